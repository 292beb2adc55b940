{{/*
The pod of every role: (list $ name role lends). `role` is what chiasm.role gives. `lends` is true for the further
nodes of a decoder: they lend their ranks to the first one, which answers for all, and listen on no port of their own.
*/}}

{{- define "chiasm.pod" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $role := index . 2 }}{{ $lends := index . 3 }}
{{- $labels := include "chiasm.matchLabels" (list $root $name) }}
{{- $keys := and (eq $name "gateway") (include "chiasm.apiKeySecret" $root) }}
{{- $tls := include "chiasm.tlsSecret" $root }}
{{- $front := and (eq $name "gateway") $tls $root.Values.tls.frontSecret }}
{{- $token := and (gt (dig "parallelism" "nodes" 1 $role | int) 1) $role.rankToken }}
metadata:
  labels:
    {{- $labels | nindent 4 }}
    {{- with $role.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if or $role.annotations (and $keys $root.Values.apiKeys.digests) }}
  annotations:
    {{- if and $keys $root.Values.apiKeys.digests }}
    checksum/api-keys: {{ $root.Values.apiKeys.digests | toJson | sha256sum }} # the file is read once
    {{- end }}
    {{- with $role.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  serviceAccountName: {{ include "chiasm.serviceAccount" $root }}
  automountServiceAccountToken: {{ eq (dig "discovery" "" $role) "kubernetes" }}
  enableServiceLinks: false
  {{- if $role.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  terminationGracePeriodSeconds: {{ include "chiasm.graceSeconds" $role }}
  securityContext:
    {{- toYaml $role.podSecurityContext | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ $name }}
      image: {{ $role.image | default (include "chiasm.image" (list $root $name)) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        {{- include "chiasm.flags" (include "chiasm.config" . | fromJson) | trim | nindent 8 }}
      env:
        - name: POD_IP
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        - name: HOME
          value: /tmp
        {{- with include "chiasm.modelEnv" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $role.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not $lends }}
      ports:
        {{- if eq $name "gateway" }}
        - { name: http, containerPort: 8000, protocol: TCP }
        {{- end }}
        - { name: grpc, containerPort: 50051, protocol: TCP }
        {{- range include "chiasm.metricsPorts" (list $name $role) | fromYamlArray }}
        - { name: {{ .name }}, containerPort: {{ .port }}, protocol: TCP }
        {{- end }}
      {{- range $kind, $timing := $role.probes }}
      {{ $kind }}Probe:
        {{- include "chiasm.probe" (list $root $name $kind) | trim | nindent 8 }}
        {{- toYaml $timing | nindent 8 }}
      {{- end }}
      {{- end }}
      lifecycle:
        {{- $drain := ternary (add (ceil $role.config.server.drain_s) 5) 0 $lends }} {{- /* the first node drains */}}
        preStop: { sleep: { seconds: {{ add $role.preStopSeconds $drain }} } }
      securityContext:
        {{- toYaml $role.securityContext | nindent 8 }}
      resources:
        {{- toYaml $role.resources | nindent 8 }}
      volumeMounts:
        - { name: tmp, mountPath: /tmp }
        {{- if $role.shmSize }}
        - { name: shm, mountPath: /dev/shm }
        {{- end }}
        {{- if $keys }}
        - { name: api-keys, mountPath: /etc/chiasm/api-keys, readOnly: true }
        {{- end }}
        {{- if $tls }}
        - { name: tls, mountPath: /etc/chiasm/tls, readOnly: true } # no subPath: a new certificate must show
        {{- end }}
        {{- if $front }}
        - { name: front, mountPath: /etc/chiasm/front, readOnly: true }
        {{- end }}
        {{- if $token }}
        - { name: rank-token, mountPath: /etc/chiasm/ranks, readOnly: true }
        {{- end }}
        {{- with include "chiasm.modelMount" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $role.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- with $role.shmSize }}
    - name: shm
      emptyDir: { medium: Memory, sizeLimit: {{ . }} }
    {{- end }}
    {{- if $keys }}
    - name: api-keys
      secret:
        secretName: {{ $keys }}
        items: [{ key: {{ $root.Values.apiKeys.secretKey }}, path: digests }]
    {{- end }}
    {{- with $tls }}
    - name: tls
      secret:
        secretName: {{ . }}
        items: [{ key: tls.crt, path: tls.crt }, { key: tls.key, path: tls.key }, { key: ca.crt, path: ca.crt }]
    {{- end }}
    {{- with $front }}
    - name: front
      secret:
        secretName: {{ . }}
        items:
          - { key: tls.crt, path: tls.crt }
          - { key: tls.key, path: tls.key }
          {{- if eq (include "chiasm.frontDoor" $root) "required" }}
          - { key: ca.crt, path: ca.crt }
          {{- end }}
    {{- end }}
    {{- with $token }}
    - name: rank-token
      secret:
        secretName: {{ .secret }}
        items: [{ key: {{ .key }}, path: token }]
    {{- end }}
    {{- with include "chiasm.modelVolume" $root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $role.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $role.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $selector := dict "labelSelector" (dict "matchLabels" (fromYaml $labels)) }}
    {{- toYaml (list (merge (deepCopy .) $selector)) | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with $role.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $role.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
{{- end -}}

{{/*
(list $ name kind). Kubelet has no certificate: where one is asked for, the pod asks itself, showing its own.
*/}}
{{- define "chiasm.probe" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $kind := index . 2 }}
{{- $path := ternary "/ready" "/health" (eq $kind "readiness") }}
{{- $live := ternary "live" "" (eq $kind "liveness") }}
{{- $door := include "chiasm.frontDoor" $root }}
{{- $url := ternary (printf "https://127.0.0.1:8000%s" $path) (printf "grpcs://127.0.0.1:50051/%s" $live) (eq $name "gateway") }}
{{- if ternary (eq $door "required") $root.Values.tls.enabled (eq $name "gateway") }}
{{- $files := include "chiasm.ownFiles" . }}
exec: { command: [python, -I, -m, chiasm.probe, {{ $url | quote }}, {{ $files }}/tls.crt, {{ $files }}/tls.key] }
{{- else if eq $name "gateway" }}
httpGet: { path: {{ $path }}, port: http{{ if eq $door "tls" }}, scheme: HTTPS{{ end }} }
{{- else }}
grpc: { port: 50051{{ with $live }}, service: {{ . }}{{ end }} }
{{- end }}
{{- end -}}

{{/* Longer than the wait, the drain and the few seconds in which what is left is cut off. */}}
{{- define "chiasm.graceSeconds" -}}
{{- add .preStopSeconds (ceil .config.server.drain_s) 15 -}}
{{- end -}}

{{/* (list name role): each worker of an encoder serves its own metrics, on the next port. */}}
{{- define "chiasm.metricsPorts" -}}
{{- range $worker := until (int (ternary (index . 1).ranks 1 (eq (index . 0) "encoder"))) }}
- { name: metrics{{ if $worker }}-{{ $worker }}{{ end }}, port: {{ add 9090 $worker }} }
{{- end }}
{{- end -}}
