// Command argocd-diff applies and compares manifests with Argo CD's own engine.
//
// KUBECONFIG names the cluster. Each request is one JSON object on stdin, and gets one line of JSON:
//
//	{"command": "sync", "strategy": ..., "manifests": [...]}   apply all manifests, as a sync does
//	{"command": "diff", "strategy": ..., "manifests": [...]}   list the objects that are OutOfSync
//
// The strategy is "legacy" (client-side apply and a three-way diff), "structured-merge" (server-side
// apply and a structured merge) or "server-side" (server-side apply and its dry run). Hooks are
// applied and never compared. The answer has "error" or "outOfSync": for each object, what is live,
// and what it would be after a sync. As in Argo CD, the schema is loaded once.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/argoproj/argo-cd/gitops-engine/pkg/diff"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/sync/hook"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/utils/kube"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/utils/tracing"
	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

// manager is Argo CD's name in metadata.managedFields.
const manager = "argocd-controller"

type request struct {
	Command, Strategy string
	Manifests         []*unstructured.Unstructured
}

type difference struct {
	Kind   string          `json:"kind"`
	Name   string          `json:"name"`
	Live   json.RawMessage `json:"live"`
	Synced json.RawMessage `json:"synced"`
}

type engine struct {
	kubectl    *kube.KubectlCmd
	config     *rest.Config
	operations kube.ResourceOperations
	dryRuns    diff.KubeApplier
	parser     *managedfields.GvkParser
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 100, 200
	kubectl := &kube.KubectlCmd{Log: logr.Discard(), Tracer: tracing.NopTracer{}}
	operations, cleanup, err := kubectl.ManageResources(config)
	if err != nil {
		return err
	}
	defer cleanup()
	dryRuns, cleanup, err := kubectl.ManageServerSideDiffDryRuns(config)
	if err != nil {
		return err
	}
	defer cleanup()
	e := engine{kubectl: kubectl, config: config, operations: operations, dryRuns: dryRuns}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var asked request
		if err := in.Decode(&asked); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		answer := map[string]any{}
		if answer["outOfSync"], err = e.do(asked); err != nil {
			answer = map[string]any{"error": err.Error()}
		}
		if err := out.Encode(answer); err != nil {
			return err
		}
	}
}

func (e *engine) do(asked request) ([]difference, error) {
	switch asked.Command {
	case "sync":
		return nil, e.sync(asked.Strategy, asked.Manifests)
	case "diff":
		return e.diff(asked.Strategy, asked.Manifests)
	}
	return nil, fmt.Errorf("unknown command %q: it is sync or diff", asked.Command)
}

func (e *engine) sync(strategy string, manifests []*unstructured.Unstructured) error {
	for _, each := range manifests {
		serverSide := strategy != "legacy"
		_, err := e.operations.ApplyResource(
			context.Background(), each, cmdutil.DryRunNone, false, true, serverSide, manager)
		if err != nil {
			return fmt.Errorf("%s %s: %w", each.GetKind(), each.GetName(), err)
		}
	}
	return nil
}

func (e *engine) diff(strategy string, manifests []*unstructured.Unstructured) ([]difference, error) {
	options, err := e.options(strategy)
	if err != nil {
		return nil, err
	}
	found := []difference{}
	for _, each := range manifests {
		if hook.IsHook(each) {
			continue
		}
		live, err := e.kubectl.GetResource(context.Background(), e.config,
			each.GroupVersionKind(), each.GetName(), each.GetNamespace())
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("%s %s: %w", each.GetKind(), each.GetName(), err)
		}
		if apierrors.IsNotFound(err) {
			live = nil
		}
		result, err := diff.Diff(each, live, options...)
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", each.GetKind(), each.GetName(), err)
		}
		if result.Modified {
			found = append(found, difference{
				each.GetKind(), each.GetName(), result.NormalizedLive, result.PredictedLive})
		}
	}
	return found, nil
}

// options returns what Argo CD passes to its engine for the strategy.
func (e *engine) options(strategy string) ([]diff.Option, error) {
	options := []diff.Option{
		diff.WithNormalizer(diff.GetNoopNormalizer()), diff.WithLogr(logr.Discard()), diff.WithManager(manager),
	}
	if strategy == "legacy" {
		return options, nil
	}
	if e.parser == nil {
		_, parser, err := e.kubectl.LoadOpenAPISchema(e.config)
		if err != nil {
			return nil, err
		}
		e.parser = parser
	}
	options = append(options, diff.WithGVKParser(e.parser))
	if strategy == "structured-merge" {
		return append(options, diff.WithStructuredMergeDiff(true)), nil
	}
	return append(options, diff.WithServerSideDiff(true),
		diff.WithServerSideDryRunner(diff.NewK8sServerSideDryRunner(e.dryRuns)),
		diff.WithIgnoreMutationWebhook(true)), nil
}
