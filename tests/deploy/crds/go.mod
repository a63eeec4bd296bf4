// The kinds of other projects that Headroom's manifests use. Nothing is compiled: tests read the
// CustomResourceDefinitions from these modules.
module headroom.gpu/tests/deploy/crds

go 1.24.0

require (
	github.com/cert-manager/cert-manager v1.11.5
	github.com/prometheus-operator/prometheus-operator v0.85.0
)
