{{- define "isthmus.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end }}

{{- /* Labels of all our objects, in addition to app.kubernetes.io/name. */ -}}
{{- define "isthmus.labels" -}}
app.kubernetes.io/part-of: isthmus
{{- /* A label has at most 63 characters, and begins and ends with a letter or digit. An image tag may have 128. */}}
app.kubernetes.io/version: {{ default .Chart.AppVersion .Values.image.tag | trunc 63 | trimAll "-_." | quote }}
{{- end }}

{{- /* The first fields of a container, which are the same for all components. */ -}}
{{- define "isthmus.container" -}}
image: {{ include "isthmus.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}

{{- define "isthmus.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "isthmus.podEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}

{{- define "isthmus.nodeEnv" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}

{{- /* Checks with messages that the schema cannot give. With --reuse-values, Helm replaces the defaults of this chart by
those of the previous one, and renders templates in any order. So each template with values that an older chart lacks begins with this. */}}
{{- define "isthmus.check" -}}
{{- if hasKey .Values.routeAgent "maxUnavailable" }}
{{- fail "value routeAgent.maxUnavailable: renamed to routeAgent.maxSurge; want --reset-then-reuse-values instead of --reuse-values, and --set routeAgent.maxUnavailable=null if you had set it" }}
{{- end }}
{{- /* With 0 no agent could be replaced. */}}
{{- if not (regexFind "^[1-9]" (printf "%v" .Values.routeAgent.maxSurge)) }}
{{- fail "value routeAgent.maxSurge: want a number of nodes, or a percentage of them such as 10%, but not 0" }}
{{- end }}
{{- end }}
