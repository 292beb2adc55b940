{{/* Where the checkpoint comes from. */}}

{{/* What --model says. */}}
{{- define "chiasm.model" -}}
{{- with .Values.model -}}
{{- if eq .source "hub" -}}{{ .hub.id }}
{{- else if eq .source "pvc" -}}{{ list "/models" .pvc.path | compact | join "/" }}
{{- else if eq .source "image" -}}{{ list "/models" .image.path | compact | join "/" }}
{{- else -}}{{ .source }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "chiasm.modelEnv" -}}
{{- with .Values.model }}
{{- if eq .source "hub" }}
- name: HF_HOME
  value: /cache
{{- with .hub.token }}
{{- if .secret }}
- name: HF_TOKEN
  valueFrom: { secretKeyRef: { name: {{ .secret }}, key: {{ .key }} } }
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "chiasm.modelMount" -}}
{{- $source := .Values.model.source }}
{{- if eq $source "hub" }}
- { name: model, mountPath: /cache }
{{- else if ne $source "demo" }}
- { name: model, mountPath: /models, readOnly: true }
{{- end }}
{{- end -}}

{{- define "chiasm.modelVolume" -}}
{{- with .Values.model }}
{{- if eq .source "pvc" }}
- name: model
  persistentVolumeClaim: { claimName: {{ .pvc.claim }}, readOnly: true }
{{- else if eq .source "image" }}
- name: model
  image: { reference: {{ .image.reference | quote }}, pullPolicy: {{ .image.pullPolicy }} }
{{- else if and (eq .source "hub") .hub.cache.enabled }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .hub.cache.existingClaim | default (printf "%s-model" (include "chiasm.fullname" $)) }}
{{- else if eq .source "hub" }}
- name: model
  emptyDir: {}
{{- end }}
{{- end }}
{{- end -}}
