// Istio's sidecar injector as a webhook of its own, without istiod: the code of istiod's webhook, with the
// configuration that Istio's chart renders.
//
//	istio-injector charts DIR                          write Istio's charts into a folder
//	istio-injector serve CONFIG VALUES CERT KEY PORT   answer reviews on the loopback
//
// ENABLE_NATIVE_SIDECARS chooses whether the proxy is an init container, as in istiod.
package main

import (
	"log"
	"net/http"
	"os"

	"istio.io/istio/manifests"
	"istio.io/istio/pilot/pkg/model"
	"istio.io/istio/pkg/config/mesh"
	"istio.io/istio/pkg/config/mesh/meshwatcher"
	"istio.io/istio/pkg/kube/inject"
	"istio.io/istio/pkg/kube/multicluster"
)

func main() {
	if os.Args[1] == "charts" {
		check(os.CopyFS(os.Args[2], manifests.FS))
		return
	}
	serve(os.Args[2], os.Args[3], os.Args[4], os.Args[5], os.Args[6])
}

func serve(config, values, cert, key, port string) {
	defaults := mesh.DefaultMeshConfig()
	store := model.NewFakeStore()
	env := &model.Environment{Watcher: meshwatcher.NewTestWatcher(defaults), ConfigStore: store}
	push := model.NewPushContext()
	push.ProxyConfigs = model.GetProxyConfigs(store, defaults)
	env.SetPushContext(push)
	watcher, err := inject.NewFileWatcher(config, values)
	check(err)
	mux := http.NewServeMux()
	_, err = inject.NewWebhook(inject.WebhookParameters{
		Watcher: watcher, Env: env, Mux: mux, MultiCluster: multicluster.NewFakeController(),
	})
	check(err)
	check(http.ListenAndServeTLS("127.0.0.1:"+port, cert, key, mux))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
