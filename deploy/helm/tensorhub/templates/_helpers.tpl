{{- define "tensorhub.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tensorhub.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tensorhub.secret" -}}
{{ .Values.existingSecret | default (printf "%s-token" .Release.Name) }}
{{- end }}

{{- define "tensorhub.host" -}}
{{ .Release.Name }}.{{ .Release.Namespace }}.svc
{{- end }}
