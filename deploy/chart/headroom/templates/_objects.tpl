{{/* Text of deploy/ with the release's namespace and images. */}}
{{- define "headroom.text" -}}
{{- $text := .text | replace "headroom-system" .root.Release.Namespace -}}
{{- $prometheus := default .root.Values.monitors.prometheus.namespace .root.Values.networkPolicies.prometheusNamespace -}}
{{- $text = replace "kubernetes.io/metadata.name: monitoring" (printf "kubernetes.io/metadata.name: %s" $prometheus) $text -}}
{{- range $name, $image := (include "headroom.images" .root | fromYaml) -}}
{{- $text = replace (printf "set-me.invalid/%s:set-me" $name) $image $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* Sets values that are null or missing to their defaults, because a parent chart removes a value by null. Changes .Values. */}}
{{- define "headroom.defaults" -}}
{{- include "headroom.fill" (dict "values" .Values "defaults" (.Files.Get "files/values.yaml" | fromYaml)) }}
{{- if not .Values.enabled }}
{{- fail "enabled is false, which has an effect only in a parent chart. Add to its dependency: `condition: headroom.enabled`" }}
{{- end }}
{{- end -}}

{{/* Sets each value of .values that is null or missing to its value in .defaults. Maps of labels are not merged. Changes .values. */}}
{{- define "headroom.fill" -}}
{{- $values := .values }}
{{- range $name, $default := .defaults }}
{{- $value := index $values $name }}
{{- if kindIs "invalid" $value }}{{ $_ := set $values $name $default }}
{{- else if and (kindIs "map" $default) (ne $name "labels") }}
{{- include "headroom.fill" (dict "values" $value "defaults" $default) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Removes null entries from a map, so that null in a value removes an entry that deploy/ sets. Changes the map. */}}
{{- define "headroom.prune" -}}
{{- $map := . }}
{{- range $key, $value := $map }}
{{- if kindIs "invalid" $value }}{{ $_ := unset $map $key }}
{{- else if kindIs "map" $value }}{{ include "headroom.prune" $value }}
{{- end }}
{{- end }}
{{- end -}}

{{/* An object with its labels, as one document. */}}
{{- define "headroom.document" }}
{{- $labels := dict "app.kubernetes.io/name" "headroom" "app.kubernetes.io/part-of" "headroom"
  "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63) }}
{{- $_ := set .object.metadata "labels" (merge (default dict .object.metadata.labels) $labels) }}
---
{{ toYaml .object }}
{{ end -}}

{{/* The files of settings, by name. The settings in the values override the files of deploy/. */}}
{{- define "headroom.settings" -}}
{{- $files := dict "10-base.yaml" (include "headroom.text" (dict "root" . "text" (.Files.Get "files/base/headroom.yaml"))) }}
{{- if .Values.defaultScheduler.enabled }}
{{- $_ := set $files "30-default-scheduler.yaml" (.Files.Get "files/default-scheduler/headroom.yaml") }}
{{- end }}
{{- if .Values.settings }}{{ $_ := set $files "headroom.yaml" (toYaml .Values.settings) }}{{ end }}
{{- toYaml $files -}}
{{- end -}}

{{/* The configuration of kube-scheduler from deploy/, merged with the values. */}}
{{- define "headroom.schedulerConfig" -}}
{{- $base := include "headroom.text" (dict "root" . "text" (.Files.Get "files/base/kube-scheduler.yaml")) | fromYaml -}}
{{- $_ := mergeOverwrite $base .Values.kubeScheduler.config }}
{{- include "headroom.prune" $base }}
{{- toYaml $base -}}
{{- end -}}

{{/* Makes the same changes as deploy/default-scheduler: the pods run only extenders, which the cluster's own kube-scheduler calls. Changes .object. */}}
{{- define "headroom.defaultScheduler" -}}
{{- $object := .object }}
{{- $name := $object.metadata.name }}
{{- if and (has $object.kind (list "Deployment" "PodDisruptionBudget")) (eq $name "headroom-scheduler") }}
{{- $_ := set $object.metadata "name" "headroom-extender" }}
{{- end }}
{{- if and (eq $object.kind "Deployment") (not (has $name (list "headroom-webhook" "headroom-console" "headroom-recorder" "headroom-device-taints"))) }}
{{- $_ := unset $object.spec.template.metadata.annotations "checksum/scheduler-config" }}
{{- $spec := $object.spec.template.spec }}
{{- range $container := $spec.containers }}
{{- if eq $container.name "extender" }}
{{- $_ := set $container "ports" (prepend $container.ports (dict "name" "verbs" "containerPort" 8888)) }}
{{- $_ := set $spec "containers" (list $container) }}
{{- end }}
{{- end }}
{{- $volumes := list }}
{{- range $spec.volumes }}{{ if not (has .name (list "scheduler-config" "credentials")) }}{{ $volumes = append $volumes . }}{{ end }}{{ end }}
{{- $_ := set $spec "volumes" $volumes }}
{{- else if and (eq $object.kind "NetworkPolicy") (eq $name "headroom-scheduler") }}
{{- $verbs := dict "ports" (list (dict "protocol" "TCP" "port" 8888)) }}
{{- $_ := set $object.spec "ingress" (append $object.spec.ingress $verbs) }}
{{- else if and (eq $object.kind "ValidatingAdmissionPolicy") (eq $name "headroom-other-schedulers") }}
{{- $_ := set (index $object.spec.variables 0) "expression" `["default-scheduler"]` }}
{{- else if and (eq $object.kind "Service") (eq $name "headroom-extender") }}
{{- $_ := set $object.spec "clusterIP" .root.Values.defaultScheduler.clusterIP }}
{{- end }}
{{- end -}}

{{/* Applies the addresses and ports of the API server to a NetworkPolicy. Changes .object. */}}
{{- define "headroom.networkPolicy" -}}
{{- $values := .root.Values.networkPolicies }}
{{- $addresses := list }}
{{- range $values.apiServerCidrs }}{{ $addresses = append $addresses (dict "ipBlock" (dict "cidr" .)) }}{{ end }}
{{- $ports := list }}
{{- range $values.apiServerPorts }}{{ $ports = append $ports (dict "protocol" "TCP" "port" .) }}{{ end }}
{{- range $rule := .object.spec.egress }}
{{- if and $rule.ports (eq (int (first $rule.ports).port) 443) }}
{{- $_ := set $rule "ports" $ports }}
{{- if $addresses }}{{ $_ := set $rule "to" $addresses }}{{ end }}
{{- end }}
{{- end }}
{{- if and $addresses (has .object.metadata.name (list "headroom-webhook" "headroom-console")) }}
{{- range $rule := .object.spec.ingress }}{{ if not $rule.from }}{{ $_ := set $rule "from" $addresses }}{{ end }}{{ end }}
{{- end }}
{{- end -}}

{{/* Lets the pods of .object, a Deployment, Job or CronJob, run on nodes with GPUs. Changes .object. */}}
{{- define "headroom.onGpuNodes" -}}
{{- if and .root.Values.onGpuNodes (has .object.kind (list "Deployment" "Job" "CronJob")) }}
{{- $spec := (default .object .object.spec.jobTemplate).spec.template.spec }}
{{- $_ := unset $spec.affinity "nodeAffinity" }}
{{- if not $spec.affinity }}{{ $_ := unset $spec "affinity" }}{{ end }}
{{- end }}
{{- end -}}
