{{- /* A Deployment or DaemonSet with the values of its part put in. */}}
{{- define "gshare.with" }}
{{- $pod := .object.spec.template.spec }}
{{- range concat ($pod.initContainers | default list) $pod.containers }}
{{- $_ := set . "image" (printf "%s:%s" $.values.image.repository ($.values.image.tag | default $.version)) }}
{{- $_ := set . "imagePullPolicy" $.values.image.pullPolicy }}
{{- end }}
{{- $container := first $pod.containers }}
{{- $_ := set $container "command" (concat $container.command (.own.arguments | default list)) }}
{{- with .own.resources }}{{ $_ := set $container "resources" . }}{{ end }}
{{- with .own.nodeSelector }}{{ $_ := set $pod "nodeSelector" (merge (dict) . ($pod.nodeSelector | default dict)) }}{{ end }}
{{- with .own.tolerations }}{{ $_ := set $pod "tolerations" (concat ($pod.tolerations | default list) .) }}{{ end }}
{{- with .values.imagePullSecrets }}{{ $_ := set $pod "imagePullSecrets" . }}{{ end }}
{{- with .own.replicas }}{{ $_ := set $.object.spec "replicas" . }}{{ end }}
{{- with .own.config }}
{{- $_ := set $.object.spec.template.metadata "annotations" (dict "gshare.io/config" (sha256sum .)) }}
{{- end }}
{{- range $pod.volumes }}
{{- if eq .name "credentials" }}{{ $_ := set .secret "secretName" $.own.credentials }}{{ end }}
{{- end }}
{{- end }}
