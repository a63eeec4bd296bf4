{{/* Applies the values of a part to its pods. .template: the pod template; .values: the part. Changes .template. */}}
{{- define "headroom.pod" -}}
{{- $spec := .template.spec }}
{{- $metadata := .template.metadata }}
{{- with .root.Values.imagePullSecrets }}
{{- $secrets := list }}{{ range . }}{{ $secrets = append $secrets (dict "name" .) }}{{ end }}
{{- $_ := set $spec "imagePullSecrets" $secrets }}
{{- end }}
{{- $values := deepCopy .values }}
{{- with $values.podLabels }}{{ $_ := set $metadata "labels" (merge $metadata.labels .) }}{{ end }}
{{- with $values.podAnnotations }}
{{- $_ := set $metadata "annotations" (merge (default dict $metadata.annotations) .) }}
{{- end }}
{{- with $values.nodeSelector }}{{ $_ := set $spec "nodeSelector" . }}{{ end }}
{{- with $values.tolerations }}{{ $_ := set $spec "tolerations" (concat (default list $spec.tolerations) .) }}{{ end }}
{{- with $values.affinity }}
{{- $_ := set $spec "affinity" (mergeOverwrite (default dict $spec.affinity) .) }}
{{- include "headroom.prune" $spec.affinity }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
{{- $constraints := list }}
{{- $own := dict "labelSelector" (dict "matchLabels" (pick $metadata.labels "app.kubernetes.io/name" "app.kubernetes.io/component")) }}
{{- range . }}{{ $constraints = append $constraints (merge (deepCopy .) $own) }}{{ end }}
{{- $_ := set $spec "topologySpreadConstraints" $constraints }}
{{- end }}
{{- with $values.priorityClassName }}{{ $_ := set $spec "priorityClassName" . }}{{ end }}
{{- end -}}

{{/* Applies resources and extraEnv of .values to .container. A variable of the values replaces a variable of the same name. */}}
{{- define "headroom.container" -}}
{{- $container := .container }}
{{- $_ := set $container "resources" (mergeOverwrite $container.resources (deepCopy .values.resources)) }}
{{- include "headroom.prune" $container.resources }}
{{- with .values.extraEnv }}
{{- $_ := set $container "env" (include "headroom.env" (dict "first" $container.env "then" .) | fromYamlArray) }}
{{- end }}
{{- end -}}

{{/* Lets every client read the metrics of .container. Changes .container. */}}
{{- define "headroom.openMetrics" -}}
{{- if .root.Values.openMetrics }}
{{- $open := dict "name" "HEADROOM_METRICS_ACCESS" "value" "open" }}
{{- $_ := set .container "env" (append (default list .container.env) $open) }}
{{- end }}
{{- end -}}

{{/* The variables .first and .then, as a list. A variable in .then replaces a variable of the same name in .first. */}}
{{- define "headroom.env" -}}
{{- $names := list }}{{ range .then }}{{ $names = append $names .name }}{{ end }}
{{- $env := list }}
{{- range .first }}{{ if not (has .name $names) }}{{ $env = append $env . }}{{ end }}{{ end }}
{{- toYaml (concat $env (default list .then)) }}
{{- end -}}

{{/* Applies the values to the scheduler's Deployment. Changes .object. */}}
{{- define "headroom.scheduler" -}}
{{- $values := .root.Values }}
{{- $template := .object.spec.template }}
{{- $_ := set .object.spec "replicas" $values.scheduler.replicas }}
{{- include "headroom.pod" (dict "root" .root "template" $template "values" $values.scheduler) }}
{{- /* kube-scheduler reads its configuration only when it starts. */}}
{{- $_ := set $template.metadata.annotations "checksum/scheduler-config" (include "headroom.schedulerConfig" .root | sha256sum) }}
{{- range $container := $template.spec.containers }}
{{- if eq $container.name "extender" }}
{{- include "headroom.openMetrics" (dict "root" $.root "container" $container) }}
{{- include "headroom.container" (dict "container" $container "values" $values.extender) }}
{{- else if eq $container.name "kube-scheduler" }}
{{- include "headroom.container" (dict "container" $container "values" $values.kubeScheduler) }}
{{- if and $values.kubeScheduler.backoffGate (include "headroom.acceptsBackoffGate" $.root) }}
{{- $_ := set $container "command" (append $container.command "--feature-gates=SchedulerPopFromBackoffQ=false") }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Applies .values to the Deployment of webhook, console or recorder. Changes .object. */}}
{{- define "headroom.part" -}}
{{- $template := .object.spec.template }}
{{- $_ := set .object.spec "replicas" .values.replicas }}
{{- include "headroom.pod" (dict "root" .root "template" $template "values" .values) }}
{{- $container := first $template.spec.containers }}
{{- include "headroom.openMetrics" (dict "root" .root "container" $container) }}
{{- include "headroom.container" (dict "container" $container "values" .values) }}
{{- if .values.hostNetwork }}
{{- $_ := set $template.spec "hostNetwork" true }}
{{- $_ := set $template.spec "dnsPolicy" "ClusterFirstWithHostNet" }}
{{- range $port := $container.ports }}{{ $_ := set $port "hostPort" $port.containerPort }}{{ end }}
{{- $_ := set $.object.spec.strategy "rollingUpdate" (dict "maxUnavailable" 1 "maxSurge" 0) }}
{{- end }}
{{- end -}}

{{/* Applies the values to the Job or CronJob of the certificates. Changes .object. */}}
{{- define "headroom.job" -}}
{{- $job := default .object .object.spec.jobTemplate }}
{{- $values := .root.Values.certificates }}
{{- include "headroom.pod" (dict "root" .root "template" $job.spec.template "values" $values) }}
{{- include "headroom.container" (dict "container" (first $job.spec.template.spec.containers) "values" $values) }}
{{- if eq .object.kind "Job" }}
{{- /* A Job cannot be changed. So each version has its own name, stays until the next one, and no GitOps tool misses it. */}}
{{- $_ := unset .object.spec "ttlSecondsAfterFinished" }}
{{- $hash := toYaml .object.spec | sha256sum | trunc 8 }}
{{- $_ := set .object.metadata "name" (printf "%s-%s" .object.metadata.name $hash) }}
{{- end }}
{{- end -}}

{{/* The DaemonSet of a pool: a copy of .object with the pool's name and values, for nodes with the pool's label. */}}
{{- define "headroom.agentPool" -}}
{{- $object := deepCopy .object }}
{{- $label := dict "headroom.gpu/pool" .pool.name }}
{{- $_ := set $object.metadata "name" (printf "%s-%s" $object.metadata.name .pool.name) }}
{{- $_ := set $object.spec.selector "matchLabels" (merge $label $object.spec.selector.matchLabels) }}
{{- $_ := set $object.spec.template.metadata "labels" (merge $label $object.spec.template.metadata.labels) }}
{{- $agent := mergeOverwrite (omit (deepCopy .root.Values.agent) "pools") (omit (deepCopy .pool) "name" "nodeLabel") }}
{{- $_ := set $agent "extraEnv" (include "headroom.env" (dict "first" .root.Values.agent.extraEnv "then" .pool.extraEnv) | fromYamlArray) }}
{{- $on := list (dict "key" .pool.nodeLabel.key "operator" "In" "values" (list .pool.nodeLabel.value)) }}
{{- include "headroom.agent" (dict "root" .root "object" $object "agent" $agent "on" $on) }}
{{- include "headroom.document" (dict "root" .root "object" $object) }}
{{- end -}}

{{/* Applies the values .agent to the agent's DaemonSet, and limits it to nodes that match all of .on. Changes .object. */}}
{{- define "headroom.agent" -}}
{{- $agent := .agent }}
{{- $spec := .object.spec.template.spec }}
{{- $container := index $spec.containers 0 }}
{{- include "headroom.pod" (dict "root" .root "template" .object.spec.template "values" $agent) }}
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
{{- $_ := set $container "env" $env }}
{{- include "headroom.openMetrics" (dict "root" .root "container" $container) }}
{{- if $agent.steering.permitted }}
{{- /* The kubelet waits for the agent's answer (components/steering). */}}
{{- $_ := set $container.resources.requests "cpu" "100m" }}
{{- /* An agent that ends without access to the API server waits until no extender uses its node (components/steering). */}}
{{- $stale := .root.Values.settings.stale_after_s | default 90 }}
{{- $_ := set $spec "terminationGracePeriodSeconds" (max 150 (add 60 (ceil $stale))) }}
{{- if gt (float64 $stale) 90.0 }}
{{- $_ := set $container "env" (append $container.env (dict "name" "HEADROOM_STALE_AFTER" "value" (toString $stale))) }}
{{- end }}
{{- end }}
{{- include "headroom.container" (dict "container" $container "values" $agent) }}
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
{{- end -}}
