{{/* Names, labels, images; (list $ role) where a role is meant. LeaderWorkerSets make longer names of ours. */}}

{{- define "chiasm.fullname" -}}
{{- $own := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- .Values.fullnameOverride | default $own | trunc 38 | trimSuffix "-" -}}
{{- end -}}

{{- define "chiasm.name" -}}
{{- printf "%s-%s" (include "chiasm.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{/* What never changes in a release's life: no version here. */}}
{{- define "chiasm.matchLabels" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "chiasm.labels" -}}
{{ include "chiasm.matchLabels" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end -}}

{{- define "chiasm.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- printf "%s-%s:%s" $image.repository (index . 1) ($image.tag | default (index . 0).Chart.AppVersion) -}}
{{- end -}}

{{- define "chiasm.serviceAccount" -}}
{{- $made := ternary (include "chiasm.fullname" .) "default" .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default $made -}}
{{- end -}}

{{/* Empty when TLS is off. */}}
{{- define "chiasm.tlsSecret" -}}
{{- if .Values.tls.enabled -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "chiasm.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{- define "chiasm.peerName" -}}
{{- .Values.tls.peerName | default (include "chiasm.fullname" .) -}}
{{- end -}}

{{/* What users need at the gateways' ports: required, tls or plain. */}}
{{- define "chiasm.frontDoor" -}}
{{- ternary (.Values.tls.frontDoor | default "required") "plain" .Values.tls.enabled -}}
{{- end -}}

{{/* Where the pods of a role, (list $ name), find what they show at their own port. */}}
{{- define "chiasm.ownFiles" -}}
{{- if and (eq (index . 1) "gateway") (index . 0).Values.tls.frontSecret -}}
/etc/chiasm/front
{{- else -}}
/etc/chiasm/tls
{{- end -}}
{{- end -}}

{{- define "chiasm.apiKeySecret" -}}
{{- if .Values.apiKeys.digests -}}
{{- include "chiasm.fullname" . }}-api-keys
{{- else -}}
{{- .Values.apiKeys.existingSecret -}}
{{- end -}}
{{- end -}}
