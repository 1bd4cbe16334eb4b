{{/* The configuration as text, and parsed. */}}
{{- define "tandem.config" -}}
{{ .Values.config | default (.Files.Get "files/tandem.yaml") }}
{{- end }}
{{- define "tandem.server" -}}
{{- $config := include "tandem.config" . | fromYaml -}}
{{- if $config.Error }}{{ fail (printf "config: no valid YAML: %s" $config.Error) }}{{ end -}}
{{- if not $config.models }}{{ fail "config: the section `models` is missing; pass a whole configuration" }}{{ end -}}
{{- $server := $config.server | default dict -}}
port: {{ $server.port | default 8000 }}
health_port: {{ $server.health_port | default $server.port | default 8000 }}
drain_seconds: {{ div (add ($server.drain_ms | default 30000 | int) 999) 1000 }}
vllm_metric_names: {{ $server.vllm_metric_names | default false }}
has_metrics_key: {{ not (empty $server.metrics_key_sha256) }}
{{- end }}
{{- define "tandem.labels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "tandem.pickerLabels" -}}
app.kubernetes.io/name: tandem-epp
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{/* A mapping of strings: `true` and `8000` would be no strings, which Kubernetes refuses. */}}
{{- define "tandem.strings" -}}
{{- range $key, $value := . }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end }}
