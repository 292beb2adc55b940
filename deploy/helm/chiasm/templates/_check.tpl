{{/* Numbers and choices that do not fit together are refused, all at once, each with what to do about it. */}}

{{- define "chiasm.check" -}}
{{- $problems := include "chiasm.problems" . | fromYamlArray -}}
{{- $imageless := list -}}
{{- range $name := list "gateway" "encoder" "decoder" -}}
{{-   $role := include "chiasm.role" (list $ $name) | fromJson -}}
{{-   $problems = concat $problems (include "chiasm.roleProblems" (list $ $name $role) | fromYamlArray) -}}
{{-   if and (not $.Values.image.repository) (not $role.image) -}}
{{-     $imageless = append $imageless (printf "REPO-%s" $name) -}}
{{-   end -}}
{{- end -}}
{{- with $imageless -}}
{{-   $advice := "image.repository is empty: build and push %s (docs/deploy.md), then set it to REPO" -}}
{{-   $problems = append $problems (printf $advice (join ", " .)) -}}
{{- end -}}
{{- with $problems }}{{ fail (printf "\n\n  %s\n" (join "\n  " .)) }}{{ end -}}
{{- end -}}

{{- define "chiasm.problems" -}}
{{- with .Values.model }}
{{- if and (eq .source "hub") (not .hub.id) }}
- >-
  model.source is hub: set model.hub.id, such as Qwen/Qwen2.5-VL-7B-Instruct
{{- else if and (eq .source "pvc") (not .pvc.claim) }}
- >-
  model.source is pvc: set model.pvc.claim to the claim that holds the checkpoint
{{- else if and (eq .source "image") (not .image.reference) }}
- >-
  model.source is image: set model.image.reference to the OCI image that holds the checkpoint
{{- end }}
{{- if and (eq .source "image") (semverCompare "<1.33.0-0" $.Capabilities.KubeVersion.Version) }}
- >-
  model.source is image: image volumes need Kubernetes 1.33, this is {{ $.Capabilities.KubeVersion.Version }}; use pvc
  or hub
{{- end }}
{{- end }}
{{- if and .Values.apiKeys.digests .Values.apiKeys.existingSecret }}
- >-
  apiKeys: give digests or existingSecret, not both
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
- >-
  ingress.enabled: set ingress.host
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
- >-
  httpRoute.enabled: set httpRoute.parentRefs to the Gateway that takes in the traffic
{{- end }}
{{- with .Values.tls }}
{{- if and .existingSecret .issuerRef }}
- >-
  tls: give existingSecret or issuerRef, not both
{{- else if and .issuerRef (not .issuerRef.name) }}
- >-
  tls.issuerRef: set its name, such as { name: our-ca, kind: ClusterIssuer }
{{- else if le (trimSuffix "h" .duration | int) (trimSuffix "h" .renewBefore | int) }}
- >-
  tls.renewBefore is {{ .renewBefore }}, tls.duration is {{ .duration }}: renew before the end, but not at once
{{- end }}
{{- if and (not .enabled) (or .frontDoor .frontSecret) }}
- >-
  tls.{{ ternary "frontDoor" "frontSecret" (ne .frontDoor "") }} is given but TLS is off: set tls.enabled
{{- else if and .frontSecret (eq .frontDoor "plain") }}
- >-
  tls.frontSecret is given, but tls.frontDoor is plain: nobody is shown it
{{- else if and .enabled (not .frontDoor) (or $.Values.ingress.enabled $.Values.httpRoute.enabled) }}
- >-
  tls.frontDoor: with {{ ternary "ingress" "httpRoute" $.Values.ingress.enabled }} say required (the proxy shows a
  certificate), tls (it speaks HTTPS to the gateways) or plain (TLS ends at the proxy)
{{- end }}
{{- if and (not .enabled) (or .existingSecret .issuerRef) }}
- >-
  tls.{{ ternary "existingSecret" "issuerRef" (ne .existingSecret "") }} is given but TLS is off: set tls.enabled
{{- end }}
{{- end }}
{{- $encoder := include "chiasm.role" (list . "encoder") | fromJson }}
{{- $decoder := include "chiasm.role" (list . "decoder") | fromJson }}
{{- range $key := list "dtype" "row_dtype" }}
{{- $ours := get $encoder.config $key }}{{ $theirs := get $decoder.config $key }}
{{- if and (ne $ours $theirs) (or (eq $key "row_dtype") (eq $encoder.config.row_dtype "auto")) }}
- >-
  encoder.config.{{ $key }} is {{ $ours }}, decoder.config.{{ $key }} is {{ $theirs }}: rows have one dtype; set both
  alike, or row_dtype of both
{{- end }}
{{- end }}
{{- $undecided := and (eq $encoder.config.dtype "auto") (eq $encoder.config.row_dtype "auto") }}
{{- if and $undecided (ne (empty $encoder.gpuResource) (empty $decoder.gpuResource)) }}
- >-
  only one of encoder and decoder has GPUs, and dtype auto is bfloat16 there and float32 elsewhere: set
  config.row_dtype of both
{{- end }}
{{- end -}}

{{/* (list $ name role) */}}
{{- define "chiasm.roleProblems" -}}
{{- $name := index . 1 }}{{ $role := index . 2 }}
{{- $limits := $role.resources.limits | default dict }}
{{- $values := (index . 0).Values }}
{{- $own := include "chiasm.overlay" (list $values.defaults.resources (get $values $name).resources) | fromJson }}
{{- $given := $own.limits | default dict }}
{{- $what := "one for each rank of a pod: decoder.parallelism.tensor x pipeline / nodes" }}
{{- if eq $name "encoder" }}{{ $what = "one for each worker: encoder.parallelism.data" }}{{ end }}
{{- if $role.gpuResource }}
{{- $asked := get $given $role.gpuResource | default $role.ranks }}
{{- if ne (toString $asked) (toString $role.ranks) }}
- >-
  {{ $name }}.resources.limits asks for {{ $asked }} {{ $role.gpuResource }}, {{ $role.ranks }} are needed,
  {{ $what }}: leave it out, the chart asks for them
{{- end }}
{{- if eq $role.config.device "cpu" }}
- >-
  {{ $name }}.config.device is cpu, {{ $name }}.gpuResource is {{ $role.gpuResource }}: set device to auto, or leave
  gpuResource empty
{{- end }}
{{- else }}
{{- range $resource, $_ := $limits }}
{{- if regexMatch "/.*gpu" $resource }}
- >-
  {{ $name }}.resources.limits asks for {{ $resource }}: set {{ $name }}.gpuResource to it instead, the chart asks for
  {{ $what }}
{{- end }}
{{- end }}
{{- if hasPrefix "cuda" ($role.config.device | default "") }}
- >-
  {{ $name }}.config.device is {{ $role.config.device }}, but the pod asks for no GPU: set {{ $name }}.gpuResource,
  such as nvidia.com/gpu
{{- end }}
{{- end }}
{{- with $role.rdma }}
{{- if and .resource (hasKey $given .resource) (ne (toString (get $given .resource)) (toString .count)) }}
- >-
  {{ $name }}.resources.limits asks for {{ get $given .resource }} {{ .resource }}, {{ $name }}.rdma.count is
  {{ .count }}: leave it out of resources, the chart asks for them
{{- end }}
{{- end }}
{{- include "chiasm.memoryProblems" . }}
{{- if not (or $role.strategy.maxSurge $role.strategy.maxUnavailable) }}
- >-
  {{ $name }}.strategy: maxSurge and maxUnavailable are both 0, so that no roll-out could begin
{{- end }}
{{- with $role.autoscaling }}
{{- if .engine }}
{{- if gt .minReplicas .maxReplicas }}
- >-
  {{ $name }}.autoscaling: minReplicas {{ .minReplicas }} is more than maxReplicas {{ .maxReplicas }}
{{- end }}
{{- if and (eq .engine "keda") (not .prometheus) }}
- >-
  {{ $name }}.autoscaling.engine is keda: set {{ $name }}.autoscaling.prometheus to the address of Prometheus
{{- end }}
{{- if not .targets }}
- >-
  {{ $name }}.autoscaling.targets is empty: there is nothing to scale on
{{- end }}
{{- $most := include "chiasm.most" $role | fromYaml }}
{{- range $metric, $target := .targets }}
{{- if and (hasKey $most $metric) (ge (float64 $target) (get $most $metric | float64)) }}
- >-
  {{ $name }}.autoscaling.targets.{{ $metric }} is {{ toJson $target }}, a pod never shows more than
  {{ get $most $metric | toJson }}: it would never be scaled; lower the target
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The most that a pod's metrics can show: it refuses work beyond. */}}
{{- define "chiasm.most" -}}
chiasm_kv_cache_usage_ratio: 1
{{- with .config.admission }}
chiasm_num_requests_running: {{ toJson .max_inflight }}
{{- end }}
{{- with .config.max_pending_patches }}
chiasm_encoder_pending_patches: {{ mulf . $.ranks | int64 }}
{{- end }}
{{- end -}}

{{/* (list $ name role): what a role may hold by its settings must fit where it is held. */}}
{{- define "chiasm.memoryProblems" -}}
{{- $name := index . 1 }}{{ $role := index . 2 }}
{{- $held := 0 }}{{ $setting := "" }}
{{- if eq $name "gateway" }}
{{- $held = $role.config.media.max_bytes_in_flight }}{{ $setting = "config.media.max_bytes_in_flight" }}
{{- else if eq $name "encoder" }}
{{- $held = mulf (add (int64 $role.config.cache_bytes) (int64 $role.config.host_cache_bytes)) $role.ranks }}
{{- $setting = "config.cache_bytes of every worker" }}
{{- if $role.config.host_cache_bytes }}{{ $setting = "config.cache_bytes and host_cache_bytes of every worker" }}{{ end }}
{{- else }}
{{- $shm := include "chiasm.bytes" ($role.shmSize | default "64Mi") | int64 }}
{{- $least := add (int64 $role.config.memory.slab_bytes) (mul 64 1048576 $role.ranks) }}
{{- if lt $shm $least }}
- >-
  decoder.shmSize is {{ $role.shmSize | default "64Mi, as containers have it" }}, but config.memory.slab_bytes and
  64Mi a rank ({{ $role.ranks }}) are {{ $least }} bytes: raise shmSize or lower slab_bytes
{{- end }}
{{- $held = $shm }}{{ $setting = "shmSize" }}
{{- with $role.parallelism }}
{{- if mod .tensor (int $role.config.parallel.ep_size) }}
- >-
  decoder.config.parallel.ep_size is {{ $role.config.parallel.ep_size }}, decoder.parallelism.tensor is {{ .tensor }}:
  experts are spread over groups of tensor parallel ranks; make tensor a multiple
{{- end }}
{{- if mod .pipeline .nodes }}
- >-
  decoder.parallelism: {{ .pipeline }} stages cannot be spread over {{ .nodes }} nodes, each holds whole stages and
  equally many: make pipeline a multiple of nodes
{{- end }}
{{- if and (gt (int .nodes) 1) (not $role.rankToken.secret) }}
- >-
  decoder.parallelism.nodes is {{ .nodes }}: set decoder.rankToken.secret to a secret of at least 16 bytes, by which
  the nodes know each other
{{- end }}
{{- end }}
{{- if and (not $role.gpuResource) (not $role.config.memory.kv_blocks) }}
{{- $held = add $shm (int64 $role.config.memory.kv_bytes) }}{{ $setting = "shmSize and config.memory.kv_bytes" }}
{{- end }}
{{- end }}
{{- with dig "limits" "memory" "" $role.resources }}
{{- if le (include "chiasm.bytes" . | int64) (int64 $held) }}
- >-
  {{ $name }}.resources.limits.memory is {{ . }}, but {{ $setting }} may take {{ int64 $held }} bytes of it: raise the
  limit or lower the setting
{{- end }}
{{- end }}
{{- end -}}
