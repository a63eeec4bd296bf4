{{/* The references of the images that the release needs, by their names in deploy/. Fails if one is not set. */}}
{{- define "headroom.images" -}}
{{- $images := dict "headroom-extender" (include "headroom.image" (dict "root" . "name" "extender")) }}
{{- if .Values.agent.enabled }}
{{- $_ := set $images "headroom-agent" (include "headroom.image" (dict "root" . "name" "agent")) }}
{{- end }}
{{- if not .Values.defaultScheduler.enabled }}
{{- $_ := set $images "kube-scheduler" (include "headroom.image" (dict "root" . "name" "kubeScheduler")) }}
{{- end }}
{{- toYaml $images }}
{{- end -}}

{{/* The reference of the image that the value images.NAME describes. */}}
{{- define "headroom.image" -}}
{{- $image := index .root.Values.images .name }}
{{- $value := printf "images.%s.repository" .name }}
{{- $example := printf "Example: --set %s=registry.example/headroom-%s (docs/get-started/images.md)" $value .name }}
{{- if not $image.repository }}
{{- fail (printf "%s is not set. Set it to the image in your registry. %s" $value $example) }}
{{- else if contains "set-me.invalid" $image.repository }}
{{- fail (printf "%s is still %s. Set it to the image in your registry. %s" $value $image.repository $example) }}
{{- else if regexMatch "(@|:[^/]*$)" $image.repository }}
{{- fail (printf "%s is %s, with a tag or a digest. Set images.%s.tag or images.%s.digest instead. %s" $value $image.repository .name .name $example) }}
{{- end }}
{{- $tag := $image.tag }}
{{- if not (or $tag $image.digest) }}
{{- if and (ne .name "kubeScheduler") (eq .root.Chart.AppVersion "0.0.0") }}
{{- fail (printf "images.%s.tag is not set, and this chart has no version, because it is not a package of a release. Example: --set images.%s.tag=1.2.3" .name .name) }}
{{- end }}
{{- $tag = ternary (include "headroom.kubeVersion" .root) .root.Chart.AppVersion (eq .name "kubeScheduler") }}
{{- end }}
{{- $image.repository }}{{ with $tag }}:{{ . }}{{ end }}{{ with $image.digest }}@{{ . }}{{ end }}
{{- end -}}

{{/* The cluster's version without its provider's suffix: v1.33.4 for v1.33.4-eks-99bf5f1 and v1.33.4+k3s1. */}}
{{- define "headroom.kubeVersion" -}}
{{- regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version }}
{{- end -}}

{{/* The version of kube-scheduler's image, such as v1.36.3; empty if neither tag nor digest nor cluster names one. */}}
{{- define "headroom.schedulerVersion" -}}
{{- $image := .Values.images.kubeScheduler }}
{{- $tag := $image.tag }}
{{- if not (or $tag $image.digest) }}{{ $tag = include "headroom.kubeVersion" . }}{{ end }}
{{- regexFind "^v?[0-9]+\\.[0-9]+\\.[0-9]+" $tag }}
{{- end -}}

{{/* Not empty if this kube-scheduler is known to accept the feature gate SchedulerPopFromBackoffQ: 1.33 to 1.38. */}}
{{- define "headroom.acceptsBackoffGate" -}}
{{- $version := include "headroom.schedulerVersion" . }}
{{- if and $version (semverCompare ">=1.33.0-0 <1.39.0-0" $version) }}true{{ end }}
{{- end -}}
