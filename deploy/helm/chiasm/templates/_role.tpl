{{/* What a role's pods are: its values over the defaults, its ranks, its settings as flags. */}}

{{/* (list base over): maps are merged, anything else is replaced. sprig's merge takes false and 0 for "not given". */}}
{{- define "chiasm.overlay" -}}
{{- $result := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{-   $below := get $result $key -}}
{{-   if and (kindIs "map" $value) (kindIs "map" $below) -}}
{{-     $value = include "chiasm.overlay" (list $below $value) | fromJson -}}
{{-   end -}}
{{-   $_ := set $result $key $value -}}
{{- end -}}
{{- toJson $result -}}
{{- end -}}

{{/* The role's values, with `ranks` beside them: processes of a pod that compute, on a GPU each if there are any. */}}
{{- define "chiasm.role" -}}
{{- $values := (index . 0).Values -}}
{{- $role := include "chiasm.overlay" (list $values.defaults (get $values (index . 1))) | fromJson -}}
{{- $ranks := 1 -}}
{{- with $role.parallelism -}}
{{-   $ranks = .data | default (div (mul .tensor .pipeline) (.nodes | default 1)) -}}
{{- end -}}
{{- $_ := set $role "ranks" $ranks -}}
{{- if $role.gpuResource -}}
{{-   $gpus := dict $role.gpuResource (toString $ranks) -}}
{{-   $_ := set $role "resources" (include "chiasm.overlay" (list $role.resources (dict "limits" $gpus)) | fromJson) -}}
{{- end -}}
{{- with $role.rdma -}}
{{-   if .resource -}}
{{-     $devices := dict .resource (toString .count) -}}
{{-     $_ := set $role "resources" (include "chiasm.overlay" (list $role.resources (dict "limits" $devices)) | fromJson) -}}
{{-     $held := dig "capabilities" "add" list $role.securityContext -}}
{{-     $pin := dict "capabilities" (dict "add" (append $held "IPC_LOCK" | uniq)) -}}
{{-     $_ := set $role "securityContext" (include "chiasm.overlay" (list $role.securityContext $pin) | fromJson) -}}
{{-   end -}}
{{- end -}}
{{- toJson $role -}}
{{- end -}}

{{/* (list $ name role): the service's config tree, what the chart knows better included. */}}
{{- define "chiasm.config" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $role := index . 2 -}}
{{- $server := dict "host" "0.0.0.0" "port" 50051 "advertise_host" "$(POD_IP)" "metrics_port" 9090 -}}
{{- if $root.Values.tls.enabled -}}
{{-   $tls := dict "tls_peer_name" (include "chiasm.peerName" $root) -}}
{{-   range $key, $file := dict "cert" "tls.crt" "key" "tls.key" "ca" "ca.crt" -}}
{{-     $_ := set $tls (printf "tls_%s_file" $key) (printf "/etc/chiasm/tls/%s" $file) -}}
{{-   end -}}
{{-   $_ := set $server "tls" $tls -}}
{{- end -}}
{{- $own := dict "model" (include "chiasm.model" $root) "server" $server -}}
{{- if eq $name "gateway" -}}
{{-   $_ := set $server "port" 8000 -}}
{{-   $_ := set $own "grpc_port" 50051 -}}
{{-   $_ := set $own "discovery" $role.discovery -}}
{{-   range $peer := list "encoder" "decoder" -}}
{{-     $address := printf "%s:50051" (include "chiasm.name" (list $root $peer)) -}}
{{-     $_ := set $own (printf "%s_urls" $peer) (list $address) -}}
{{-   end -}}
{{-   if $root.Values.tls.enabled -}}
{{-     $front := dict "front_door" (include "chiasm.frontDoor" $root) -}}
{{-     if $root.Values.tls.frontSecret -}}
{{-       $_ := set $front "front_cert_file" "/etc/chiasm/front/tls.crt" -}}
{{-       $_ := set $front "front_key_file" "/etc/chiasm/front/tls.key" -}}
{{-       if eq $front.front_door "required" -}}
{{-         $_ := set $front "front_ca_file" "/etc/chiasm/front/ca.crt" -}}
{{-       end -}}
{{-     end -}}
{{-     $_ := set $own "front" $front -}}
{{-   end -}}
{{-   if include "chiasm.apiKeySecret" $root -}}
{{-     $_ := set $own "api_key_file" "/etc/chiasm/api-keys/digests" -}}
{{-   end -}}
{{- else -}}
{{-   $_ := set $own "transport" $root.Values.transport -}}
{{- end -}}
{{- if and $role.gpuResource (eq $role.config.device "auto") -}}
{{-   $_ := set $own "device" "cuda" }} {{- /* an image without CUDA must fail, not compute on the CPU */ -}}
{{- end -}}
{{- if eq $name "encoder" -}}
{{-   $_ := set $own "dp_size" $role.parallelism.data -}}
{{- else if eq $name "decoder" -}}
{{-   $parallel := dict "tp_size" $role.parallelism.tensor "pp_size" $role.parallelism.pipeline -}}
{{-   if gt (int $role.parallelism.nodes) 1 -}}
{{-     $_ := set $parallel "rank_token_file" "/etc/chiasm/ranks/token" -}}
{{-   end -}}
{{-   $_ := set $own "parallel" $parallel -}}
{{- end -}}
{{- include "chiasm.overlay" (list $role.config $own) -}}
{{- end -}}

{{/* A config tree as a list of flags: the leaves' names are unique, what is empty is left to the service. */}}
{{- define "chiasm.flags" -}}
{{- range $key, $value := . }}
{{- if kindIs "map" $value }}
{{- include "chiasm.flags" $value }}
{{- else if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $key | replace "_" "-" }}
{{- else if kindIs "slice" $value }}
{{- with $value }}
- --{{ $key | replace "_" "-" }}={{ join "," . }}
{{- end }}
{{- else if kindIs "string" $value }}
{{- with $value }}
- --{{ $key | replace "_" "-" }}={{ . }}
{{- end }}
{{- else }}
- --{{ $key | replace "_" "-" }}={{ toJson $value }}
{{- end }}
{{- end }}
{{- end -}}

{{/* (list $ name role): what runs the pods, as autoscalers name it. */}}
{{- define "chiasm.workload" -}}
{{- if gt (dig "parallelism" "nodes" 1 (index . 2) | int) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
name: {{ include "chiasm.name" . }}-nodes
{{- else -}}
apiVersion: apps/v1
kind: Deployment
name: {{ include "chiasm.name" . }}
{{- end -}}
{{- end -}}

{{/* (list $ name role): the pods that answer. Of a decoder over several nodes, the first of each group. */}}
{{- define "chiasm.answering" -}}
{{ include "chiasm.matchLabels" . }}
{{- if gt (dig "parallelism" "nodes" 1 (index . 2) | int) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{/* Bytes of a Kubernetes quantity such as 512Mi. */}}
{{- define "chiasm.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (regexFind "^[0-9.]+" (toString .) | float64) (get $units (regexFind "[A-Za-z]*$" (toString .))) | int64 -}}
{{- end -}}
