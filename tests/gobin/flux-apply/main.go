// Command flux-apply applies manifests with Flux's own engine, as a reconciliation of its
// kustomize-controller does.
//
//	flux-apply < MANIFESTS
//
// KUBECONFIG names the cluster. MANIFESTS is a JSON array. The result is one line for each object
// that was created or changed. Without drift, a second run prints nothing.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/polling"
	"github.com/fluxcd/pkg/ssa"
	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// As kustomize-controller sets them: its name in metadata.managedFields, and the annotation of
// objects that it may replace.
const (
	manager = "kustomize-controller"
	force   = "kustomize.toolkit.fluxcd.io/force"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	log.SetLogger(logr.Discard())
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 100, 200
	var manifests []*unstructured.Unstructured
	if err := json.NewDecoder(os.Stdin).Decode(&manifests); err != nil {
		return err
	}
	resources, err := newManager(config)
	if err != nil {
		return err
	}
	options := ssa.DefaultApplyOptions()
	options.ForceSelector = map[string]string{force: "enabled"}
	changes, err := resources.ApplyAllStaged(context.Background(), manifests, options)
	if err != nil {
		return err
	}
	for _, entry := range changes.Entries {
		if entry.Action != ssa.UnchangedAction {
			fmt.Println(entry.String())
		}
	}
	return nil
}

func newManager(config *rest.Config) (*ssa.ResourceManager, error) {
	http, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	mapper, err := apiutil.NewDynamicRESTMapper(config, http)
	if err != nil {
		return nil, err
	}
	reader, err := client.New(config, client.Options{Mapper: mapper})
	if err != nil {
		return nil, err
	}
	poller := polling.NewStatusPoller(reader, mapper, polling.Options{})
	return ssa.NewResourceManager(reader, poller, ssa.Owner{Field: manager, Group: "kustomize.toolkit.fluxcd.io"}), nil
}
