{{/* Checks the images. Fails if one is missing or has neither tag nor digest. */}}
{{- define "headroom.images" -}}
{{- $wanted := dict "extender" "headroom-extender:0.1.0" }}
{{- if not .Values.defaultScheduler.enabled }}{{ $_ := set $wanted "kubeScheduler" "kube-scheduler:v1.36.3" }}{{ end }}
{{- if .Values.agent.enabled }}{{ $_ := set $wanted "agent" "headroom-agent:0.1.0" }}{{ end }}
{{- range $name, $example := $wanted }}
{{- $image := index $.Values.images $name }}
{{- $right := printf "Example: --set images.%s=registry.example/%s (docs/install.md describes how to build the images)" $name $example }}
{{- if not $image }}{{ fail (printf "images.%s is not set, and no registry publishes it. %s" $name $right) }}{{ end }}
{{- if contains "set-me.invalid" $image }}{{ fail (printf "images.%s is still %s. %s" $name $image $right) }}{{ end }}
{{- if not (regexMatch "(@sha256:[0-9a-f]{64}|:[A-Za-z0-9_][A-Za-z0-9._-]*)$" $image) }}
{{- fail (printf "images.%s is %s, without a tag or a digest. %s" $name $image $right) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Text of deploy/ as this release has it: its namespace, its images. */}}
{{- define "headroom.text" -}}
{{- $images := .root.Values.images -}}
{{- .text | replace "headroom-system" .root.Release.Namespace
  | replace "set-me.invalid/headroom-extender:set-me" $images.extender
  | replace "set-me.invalid/headroom-agent:set-me" (default "" $images.agent)
  | replace "set-me.invalid/kube-scheduler:set-me" (default "" $images.kubeScheduler) -}}
{{- end -}}

{{/* An object, labelled, as one document. */}}
{{- define "headroom.document" }}
{{- $labels := dict "app.kubernetes.io/name" "headroom" "app.kubernetes.io/part-of" "headroom"
  "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version) }}
{{- $_ := set .object.metadata "labels" (merge (default dict .object.metadata.labels) $labels) }}
---
{{ toYaml .object }}
{{ end -}}

{{/* Settings and kube-scheduler's configuration: those of deploy/ with the values on top. */}}
{{- define "headroom.settings" -}}
{{- $folder := ternary "default-scheduler" "base" .Values.defaultScheduler.enabled -}}
{{- $base := include "headroom.text" (dict "root" . "text" (.Files.Get (printf "files/%s/headroom.yaml" $folder))) | fromYaml -}}
{{- toYaml (mergeOverwrite $base .Values.settings) -}}
{{- end -}}
{{- define "headroom.schedulerConfig" -}}
{{- $base := include "headroom.text" (dict "root" . "text" (.Files.Get "files/base/kube-scheduler.yaml")) | fromYaml -}}
{{- /* Resources that the values name in full are not bound by kube-scheduler alone either. */}}
{{- $entry := first $base.extenders }}
{{- range $resource := .Values.settings.resources }}
{{- $managed := dict "name" $resource "ignoredByScheduler" false }}
{{- if not (or (hasSuffix "*" $resource) (has $managed $entry.managedResources)) }}
{{- $_ := set $entry "managedResources" (append $entry.managedResources $managed) }}
{{- end }}
{{- end }}
{{- toYaml (mergeOverwrite $base .Values.kubeScheduler.config) -}}
{{- end -}}

{{/* What the values say of the scheduler's Deployment. Changes .object. */}}
{{- define "headroom.scheduler" -}}
{{- $values := .root.Values }}
{{- $_ := set .object.spec "replicas" $values.replicas }}
{{- $template := .object.spec.template }}
{{- /* kube-scheduler reads its configuration at the start alone. */}}
{{- $_ := set $template.metadata.annotations "checksum/scheduler-config" (include "headroom.schedulerConfig" .root | sha256sum) }}
{{- include "headroom.pulling" (dict "root" .root "spec" $template.spec) }}
{{- range $container := $template.spec.containers }}
{{- if eq $container.name "extender" }}
{{- $_ := set $container "resources" (mergeOverwrite $container.resources $values.extender.resources) }}
{{- else if eq $container.name "kube-scheduler" }}
{{- $_ := set $container "resources" (mergeOverwrite $container.resources $values.kubeScheduler.resources) }}
{{- if not $values.kubeScheduler.backoffGate }}
{{- $_ := set $container "command" (without $container.command "--feature-gates=SchedulerPopFromBackoffQ=false") }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What .values say of the Deployment of webhook or console. Changes .object. */}}
{{- define "headroom.part" -}}
{{- $_ := set .object.spec "replicas" .values.replicas }}
{{- include "headroom.pulling" (dict "root" .root "spec" .object.spec.template.spec) }}
{{- $container := index .object.spec.template.spec.containers 0 }}
{{- $_ := set $container "resources" (mergeOverwrite $container.resources .values.resources) }}
{{- end -}}

{{/* What deploy/default-scheduler changes: extenders alone, whose verbs the cluster's own kube-scheduler calls. Changes .object. */}}
{{- define "headroom.defaultScheduler" -}}
{{- $object := .object }}
{{- $name := $object.metadata.name }}
{{- if and (has $object.kind (list "Deployment" "PodDisruptionBudget")) (eq $name "headroom-scheduler") }}
{{- $_ := set $object.metadata "name" "headroom-extender" }}
{{- end }}
{{- if and (eq $object.kind "Deployment") (not (has $name (list "headroom-webhook" "headroom-console"))) }}
{{- $_ := unset $object.spec.template.metadata.annotations "checksum/scheduler-config" }}
{{- $spec := $object.spec.template.spec }}
{{- range $container := $spec.containers }}
{{- if eq $container.name "extender" }}
{{- $_ := set $container "ports" (prepend $container.ports (dict "name" "verbs" "containerPort" 8888)) }}
{{- $mount := dict "name" "client-ca" "mountPath" "/etc/headroom/client" "readOnly" true }}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts $mount) }}
{{- $_ := set $spec "containers" (list $container) }}
{{- end }}
{{- end }}
{{- $volumes := list }}
{{- range $spec.volumes }}{{ if ne .name "scheduler-config" }}{{ $volumes = append $volumes . }}{{ end }}{{ end }}
{{- $authority := dict "secretName" "headroom-scheduler-client" "items" (list (dict "key" "ca.crt" "path" "ca.crt")) }}
{{- $_ := set $spec "volumes" (append $volumes (dict "name" "client-ca" "secret" $authority)) }}
{{- else if and (eq $object.kind "NetworkPolicy") (eq $name "headroom-scheduler") }}
{{- $verbs := dict "ports" (list (dict "protocol" "TCP" "port" 8888)) }}
{{- $_ := set $object.spec "ingress" (append $object.spec.ingress $verbs) }}
{{- else if and (eq $object.kind "ValidatingAdmissionPolicy") (eq $name "headroom-other-schedulers") }}
{{- $_ := set (index $object.spec.variables 0) "expression" `["default-scheduler"]` }}
{{- else if and (eq $object.kind "Service") (eq $name "headroom-extender") }}
{{- $_ := set $object.spec "clusterIP" .root.Values.defaultScheduler.clusterIP }}
{{- end }}
{{- end -}}

{{- define "headroom.pulling" -}}
{{- with .root.Values.imagePullSecrets }}
{{- $names := list }}{{ range . }}{{ $names = append $names (dict "name" .) }}{{ end }}
{{- $_ := set $.spec "imagePullSecrets" $names }}
{{- end }}
{{- end -}}

{{/* What the values say of Jobs, on a schedule or not. Changes .object. */}}
{{- define "headroom.job" -}}
{{- $job := default .object .object.spec.jobTemplate }}
{{- include "headroom.pulling" (dict "root" .root "spec" $job.spec.template.spec) }}
{{- end -}}

{{/* The agents of a pool: .object under the pool's name, on the nodes with its label, with its values. */}}
{{- define "headroom.agentPool" -}}
{{- $object := deepCopy .object }}
{{- $label := dict "headroom.gpu/pool" .pool.name }}
{{- $_ := set $object.metadata "name" (printf "%s-%s" $object.metadata.name .pool.name) }}
{{- $_ := set $object.spec.selector "matchLabels" (merge $label $object.spec.selector.matchLabels) }}
{{- $_ := set $object.spec.template.metadata "labels" (merge $label $object.spec.template.metadata.labels) }}
{{- $agent := mergeOverwrite (omit (deepCopy .root.Values.agent) "pools") (omit .pool "name" "nodeLabel") }}
{{- $on := list (dict "key" .pool.nodeLabel.key "operator" "In" "values" (list .pool.nodeLabel.value)) }}
{{- include "headroom.agent" (dict "root" .root "object" $object "agent" $agent "on" $on) }}
{{- include "headroom.document" (dict "root" .root "object" $object) }}
{{- end -}}

{{/* What the values .agent say of the agent's DaemonSet, whose nodes match all of .on. Changes .object. */}}
{{- define "headroom.agent" -}}
{{- $agent := .agent }}
{{- $spec := .object.spec.template.spec }}
{{- $container := index $spec.containers 0 }}
{{- include "headroom.pulling" (dict "root" .root "spec" $spec) }}
{{- with $agent.runtimeClassName }}{{ $_ := set $spec "runtimeClassName" . }}{{ end }}
{{- $required := $spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution }}
{{- with $agent.nodeSelectorTerms }}{{ $_ := set $required "nodeSelectorTerms" . }}{{ end }}
{{- $terms := list }}
{{- range $term := concat $required.nodeSelectorTerms $agent.moreNodeSelectorTerms }}
{{- $terms = append $terms (merge (dict "matchExpressions" (concat (default list $term.matchExpressions) $.on)) $term) }}
{{- end }}
{{- $_ := set $required "nodeSelectorTerms" $terms }}
{{- $env := $container.env }}
{{- if $agent.steering.byDefault }}{{ $env = append $env (dict "name" "HEADROOM_DEVICE_CHOICE" "value" "steered") }}{{ end }}
{{- if $agent.mig }}{{ $env = append $env (dict "name" "NVIDIA_MIG_MONITOR_DEVICES" "value" "all") }}{{ end }}
{{- if $agent.driverFolder }}{{ $env = append $env (dict "name" "LD_LIBRARY_PATH" "value" "/usr/local/nvidia/lib64") }}{{ end }}
{{- range $name, $value := $agent.env }}{{ $env = append $env (dict "name" $name "value" $value) }}{{ end }}
{{- $_ := set $container "env" $env }}
{{- if $agent.steering.permitted }}
{{- range $mount := $container.volumeMounts }}
{{- if eq $mount.name "device-plugins" }}{{ $_ := set $mount "readOnly" false }}{{ end }}
{{- end }}
{{- end }}
{{- if $agent.driverFolder }}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts (dict "name" "driver" "mountPath" "/usr/local/nvidia" "readOnly" true)) }}
{{- $_ := set $spec "volumes" (append $spec.volumes (dict "name" "driver" "hostPath" (dict "path" $agent.driverFolder "type" "Directory"))) }}
{{- end }}
{{- $security := $container.securityContext }}
{{- if not $agent.ptrace }}
{{- $_ := unset $security.capabilities "add" }}{{ $_ := unset $security "appArmorProfile" }}
{{- end }}
{{- if $agent.mig }}
{{- $_ := unset $security "allowPrivilegeEscalation" }}
{{- $_ := set $security.capabilities "add" (append (default list $security.capabilities.add) "SYS_ADMIN") }}
{{- end }}
{{- if $agent.selinux }}{{ $_ := set $security "seLinuxOptions" (dict "type" "spc_t") }}{{ end }}
{{- if $agent.privileged }}
{{- $_ := set $security "privileged" true }}
{{- range $key := list "allowPrivilegeEscalation" "capabilities" "appArmorProfile" }}{{ $_ := unset $security $key }}{{ end }}
{{- end }}
{{- $_ := set $container "resources" (mergeOverwrite $container.resources $agent.resources) }}
{{- end -}}
