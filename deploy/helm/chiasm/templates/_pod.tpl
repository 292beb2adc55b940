{{/*
The pod of every role: (list $ name role lends). `role` is what chiasm.role gives. `lends` is true for the further
nodes of a decoder: they lend their ranks to the first one, which answers for all, and listen on no port of their own.
*/}}

{{- define "chiasm.pod" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $role := index . 2 }}{{ $lends := index . 3 }}
{{- $labels := include "chiasm.matchLabels" (list $root $name) }}
{{- $keys := and (eq $name "gateway") (include "chiasm.apiKeySecret" $root) }}
{{- $tls := include "chiasm.tlsSecret" $root }}
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
        {{- if eq $name "gateway" }}
        httpGet: { path: {{ ternary "/ready" "/health" (eq $kind "readiness") }}, port: http }
        {{- else }}
        grpc: { port: {{ ternary 50052 50051 (ne $tls "") }}{{ if eq $kind "liveness" }}, service: live{{ end }} }
        {{- end }}
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
