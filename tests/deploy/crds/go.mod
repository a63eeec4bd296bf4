// Definitions of kinds of another project, which tests/deploy/foreign.py reads. Nothing is compiled.
module headroom.gpu/tests/deploy/crds

go 1.24.0

require github.com/prometheus-operator/prometheus-operator v0.85.0
