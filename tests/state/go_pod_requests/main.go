// Command podrequests prints what kube-scheduler counts for each pod on stdin, one JSON per line.
package main

import (
	"bufio"
	"encoding/json"
	"os"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"
)

func main() {
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	out := json.NewEncoder(os.Stdout)
	for in.Scan() {
		var pod v1.Pod
		if err := json.Unmarshal(in.Bytes(), &pod); err != nil {
			panic(err)
		}
		// As in pkg/scheduler/framework/types.go, with the gates on.
		counted := resource.PodRequests(&pod, resource.PodResourcesOptions{
			UseStatusResources: true,
			InPlacePodLevelResourcesVerticalScalingEnabled: true,
		})
		amounts := map[string]string{}
		for name, quantity := range counted {
			amounts[string(name)] = quantity.AsDec().String()
		}
		out.Encode(amounts)
	}
}
