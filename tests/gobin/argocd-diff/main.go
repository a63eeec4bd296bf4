// Command argocd-diff applies and compares manifests with Argo CD's own engine.
//
//	argocd-diff sync STRATEGY < MANIFESTS    apply all manifests, as a sync of Argo CD does
//	argocd-diff diff STRATEGY < MANIFESTS    print each object that Argo CD shows as OutOfSync
//
// STRATEGY is "legacy" (client-side apply and a three-way diff), "structured-merge" (server-side
// apply and a structured merge) or "server-side" (server-side apply and its dry run). KUBECONFIG
// names the cluster. MANIFESTS is a JSON array. Hooks are applied and never compared. The result is
// one JSON object a line: what is live, and what it would be after a sync.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/argoproj/argo-cd/gitops-engine/pkg/diff"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/sync/hook"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/utils/kube"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/utils/tracing"
	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

// manager is Argo CD's name in metadata.managedFields.
const manager = "argocd-controller"

type engine struct {
	kubectl  *kube.KubectlCmd
	config   *rest.Config
	strategy string
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 3 {
		return fmt.Errorf("usage: argocd-diff sync|diff legacy|structured-merge|server-side < MANIFESTS")
	}
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 100, 200
	var manifests []*unstructured.Unstructured
	if err := json.NewDecoder(os.Stdin).Decode(&manifests); err != nil {
		return err
	}
	kubectl := &kube.KubectlCmd{Log: logr.Discard(), Tracer: tracing.NopTracer{}}
	e := engine{kubectl, config, os.Args[2]}
	if os.Args[1] == "sync" {
		return e.sync(manifests)
	}
	return e.diff(manifests)
}

func (e engine) sync(manifests []*unstructured.Unstructured) error {
	operations, cleanup, err := e.kubectl.ManageResources(e.config)
	if err != nil {
		return err
	}
	defer cleanup()
	for _, each := range manifests {
		serverSide := e.strategy != "legacy"
		_, err := operations.ApplyResource(
			context.Background(), each, cmdutil.DryRunNone, false, true, serverSide, manager)
		if err != nil {
			return fmt.Errorf("%s %s: %w", each.GetKind(), each.GetName(), err)
		}
	}
	return nil
}

func (e engine) diff(manifests []*unstructured.Unstructured) error {
	options, cleanup, err := e.options()
	if err != nil {
		return err
	}
	defer cleanup()
	out := json.NewEncoder(os.Stdout)
	for _, each := range manifests {
		if hook.IsHook(each) {
			continue
		}
		live, err := e.kubectl.GetResource(context.Background(), e.config,
			each.GroupVersionKind(), each.GetName(), each.GetNamespace())
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("%s %s: %w", each.GetKind(), each.GetName(), err)
		}
		if apierrors.IsNotFound(err) {
			live = nil
		}
		result, err := diff.Diff(each, live, options...)
		if err != nil {
			return fmt.Errorf("%s %s: %w", each.GetKind(), each.GetName(), err)
		}
		if !result.Modified {
			continue
		}
		err = out.Encode(map[string]any{
			"kind": each.GetKind(), "name": each.GetName(),
			"live":   json.RawMessage(result.NormalizedLive),
			"synced": json.RawMessage(result.PredictedLive),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// options returns what Argo CD passes to its engine for the strategy.
func (e engine) options() ([]diff.Option, func(), error) {
	options := []diff.Option{
		diff.WithNormalizer(diff.GetNoopNormalizer()), diff.WithLogr(logr.Discard()), diff.WithManager(manager),
	}
	if e.strategy == "legacy" {
		return options, func() {}, nil
	}
	_, parser, err := e.kubectl.LoadOpenAPISchema(e.config)
	if err != nil {
		return nil, nil, err
	}
	options = append(options, diff.WithGVKParser(parser))
	if e.strategy == "structured-merge" {
		return append(options, diff.WithStructuredMergeDiff(true)), func() {}, nil
	}
	applier, cleanup, err := e.kubectl.ManageServerSideDiffDryRuns(e.config)
	if err != nil {
		return nil, nil, err
	}
	runner := diff.NewK8sServerSideDryRunner(applier)
	return append(options, diff.WithServerSideDiff(true), diff.WithServerSideDryRunner(runner),
		diff.WithIgnoreMutationWebhook(true)), cleanup, nil
}
