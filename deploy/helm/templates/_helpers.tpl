{{- define "fedsurrogate.labels" -}}
app.kubernetes.io/name: fedsurrogate
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "fedsurrogate.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "fedsurrogate.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- if .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml .Values.imagePullSecrets | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.runAsUser }}
  runAsGroup: {{ .Values.runAsUser }}
  fsGroup: {{ .Values.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  {{- if .Values.seLinuxLevel }}
  seLinuxOptions:
    level: {{ .Values.seLinuxLevel | quote }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "fedsurrogate.container" -}}
image: {{ include "fedsurrogate.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "fedsurrogate.together" -}}
podAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          app.kubernetes.io/instance: {{ .Release.Name }}
          fedsurrogate/holds: runtime
{{- end -}}

{{- define "fedsurrogate.log" -}}
- name: FEDSURROGATE_LOG
{{- if .Values.jsonLogs }}
  value: json
{{- else }}
  value: text
{{- end }}
{{- end -}}

{{- define "fedsurrogate.nodeConfig" -}}
site="{{ .Values.site.name }}" data="{{ .Values.site.data.kind }}" data-dir="/data" dataset="{{ .Values.site.data.dataset }}" label-column="{{ .Values.site.data.labelColumn }}" patient-column="{{ .Values.site.data.patientColumn }}" coordinator-key="/keys/coordinator.pub" policy="{{ if .Values.site.policy }}/policy/policy.toml{{ end }}" state-dir="/state" check-log-dir="/check-log" cache-dir="/cache" {{ if .Values.site.heldOutClaim }}held-out-dir="/held-out" {{ end }}{{ .Values.site.nodeConfig }}
{{- end -}}
