{{/* The launcher's command line. Options given here win over any environment. */}}
{{- define "deepseek-tgi.args" -}}
- --backend=deepseek-quant
- --router=embedded
- {{ printf "--model-id=%s" .Values.model.modelUri | quote }}
{{- with .Values.model.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
- --num-shard={{ .Values.model.tensorParallelSize }}
- --kv-cache-dtype={{ .Values.model.kvCacheQuantization }}
{{- with .Values.model.kvMemory }}
- --kv-memory={{ . }}
{{- end }}
{{- with .Values.model.maxInputTokens }}
- --max-input-tokens={{ int64 . }}
{{- end }}
{{- with .Values.model.maxTotalTokens }}
- --max-total-tokens={{ int64 . }}
{{- end }}
- --max-concurrent-requests={{ int64 .Values.model.maxConcurrentRequests }}
- --device={{ ternary "cuda" "cpu" .Values.gpu.enabled }}
- {{ printf "--hostname=%s" .Values.server.hostname | quote }}
- --port={{ .Values.server.port }}
- --probe-port={{ .Values.probes.port }}
- --stall-limit={{ .Values.probes.stallLimitSeconds }}
- --shutdown-delay={{ .Values.drain.shutdownDelaySeconds }}
- --graceful-termination-timeout={{ .Values.drain.limitSeconds }}
{{- if .Values.grpc.enabled }}
- --grpc-port={{ .Values.grpc.port }}
{{- if .Values.grpc.tls.existingSecret }}
- --grpc-tls-cert=/etc/deepseek-tgi/tls/tls.crt
- --grpc-tls-key=/etc/deepseek-tgi/tls/tls.key
{{- if .Values.grpc.tls.clientCertificates }}
- --grpc-client-ca=/etc/deepseek-tgi/tls/ca.crt
{{- end }}
{{- else if .Values.grpc.tls.clientCertificates }}
{{- fail "grpc.tls.clientCertificates: clients show certificates over TLS only: name grpc.tls.existingSecret too" }}
{{- end }}
{{- end }}
{{- if .Values.server.jsonOutput }}
- --json-output
{{- end }}
{{- range .Values.server.extraArgs }}
{{- $name := regexReplaceAll "=.*$" . "" }}
{{- if or (has $name (include "deepseek-tgi.ownOptions" $ | fromJsonArray)) (regexMatch "^-[pg]" .) }}
{{- fail (printf "server.extraArgs: %s is an option that other values of this chart set" $name) }}
{{- end }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "deepseek-tgi.ownOptions" -}}
["--backend", "--router", "--model-id", "--revision", "--num-shard", "--sharded", "--kv-cache-dtype", "--kv-memory",
 "--max-input-tokens", "--max-input-length", "--max-total-tokens", "--max-concurrent-requests", "--device", "--hostname",
 "--port", "--probe-port", "--stall-limit", "--shutdown-delay", "--graceful-termination-timeout", "--json-output",
 "--admin-token", "--api-key", "--grpc-port", "--grpc-tls-cert", "--grpc-tls-key", "--grpc-client-ca"]
{{- end }}

{{- define "deepseek-tgi.env" -}}
- name: LOG_LEVEL
  value: {{ .Values.server.logLevel }}
# The user may have neither a name nor a home in the image, and the root cannot be written.
- name: USER
  value: deepseek-tgi
- name: HOME
  value: /cache
- name: DEEPSEEK_TGI_CACHE
  value: /cache/made
- name: HUGGINGFACE_HUB_CACHE
  value: /models/hub
{{- if .Values.metrics.enabled }}
- name: DEEPSEEK_TGI_METRICS_PORT
  value: {{ .Values.metrics.port | quote }}
{{- end }}
{{- include "deepseek-tgi.secretEnv" (list "API_KEY" .Values.auth.apiKey) }}
{{- include "deepseek-tgi.secretEnv" (list "DEEPSEEK_TGI_ADMIN_TOKEN" .Values.auth.adminToken) }}
{{- include "deepseek-tgi.secretEnv" (list "HF_TOKEN" .Values.auth.hfToken) }}
{{- range .Values.server.extraEnv }}
{{- if has .name (include "deepseek-tgi.ownNames" $ | fromJsonArray) }}
{{- fail (printf "server.extraEnv: %s is a name that other values of this chart set" .name) }}
{{- end }}
- {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "deepseek-tgi.ownNames" -}}
["LOG_LEVEL", "USER", "HOME", "DEEPSEEK_TGI_CACHE", "HUGGINGFACE_HUB_CACHE", "DEEPSEEK_TGI_METRICS_PORT", "API_KEY",
 "DEEPSEEK_TGI_ADMIN_TOKEN", "HF_TOKEN", "HF_API_TOKEN"]
{{- end }}

{{- define "deepseek-tgi.ports" -}}
- name: http
  containerPort: {{ .Values.server.port }}
- name: probes
  containerPort: {{ .Values.probes.port }}
{{- if .Values.grpc.enabled }}
- name: grpc
  containerPort: {{ .Values.grpc.port }}
{{- end }}
{{- if .Values.metrics.enabled }}
- name: metrics
  containerPort: {{ .Values.metrics.port }}
{{- end }}
{{- end }}

{{/* How one probe asks: (list context "live" "/livez" timeout). */}}
{{- define "deepseek-tgi.handler" -}}
{{- $context := index . 0 }}
{{- if eq $context.Values.probes.handler "exec" -}}
exec:
  command: [deepseek-tgi, probe, {{ index . 1 }}, --port={{ $context.Values.probes.port }}, --timeout={{ index . 3 }}]
{{- else if and (eq $context.Values.probes.handler "grpc") (eq (index . 1) "ready") -}}
{{- if or (not $context.Values.grpc.enabled) $context.Values.grpc.tls.existingSecret }}
{{- fail "probes.handler: grpc needs grpc.enabled, and no grpc.tls: a kubelet asks in plain text" }}
{{- end -}}
{{- if semverCompare "<1.24.0-0" $context.Capabilities.KubeVersion.Version }}
{{- fail "probes.handler: grpc needs Kubernetes 1.24 or later" }}
{{- end -}}
grpc:
  port: {{ $context.Values.grpc.port }}
{{- else -}}
httpGet:
  path: {{ index . 2 }}
  port: probes
{{- end }}
timeoutSeconds: {{ index . 3 }}
{{- end }}

{{- define "deepseek-tgi.probes" -}}
{{- with .Values.probes -}}
startupProbe:
  {{- include "deepseek-tgi.handler" (list $ "startup" "/startupz" .startup.timeoutSeconds) | nindent 2 }}
  periodSeconds: {{ .startup.periodSeconds }}
  failureThreshold: {{ divf .startup.limitSeconds .startup.periodSeconds | ceil | int }}
  {{- include "deepseek-tgi.shortGrace" $ | nindent 2 }}
readinessProbe:
  {{- include "deepseek-tgi.handler" (list $ "ready" "/readyz" .readiness.timeoutSeconds) | nindent 2 }}
  periodSeconds: {{ .readiness.periodSeconds }}
  failureThreshold: {{ .readiness.failureThreshold }}
livenessProbe:
  {{- include "deepseek-tgi.handler" (list $ "live" "/livez" .liveness.timeoutSeconds) | nindent 2 }}
  periodSeconds: {{ .liveness.periodSeconds }}
  failureThreshold: {{ .liveness.failureThreshold }}
  {{- include "deepseek-tgi.shortGrace" $ | nindent 2 }}
{{- end }}
{{- end }}

{{/* Who has never started, or is no longer live, has nothing to finish. */}}
{{- define "deepseek-tgi.shortGrace" -}}
{{- if semverCompare ">=1.25.0-0" .Capabilities.KubeVersion.Version -}}
terminationGracePeriodSeconds: {{ add .Values.drain.preStopSeconds 15 }}
{{- end }}
{{- end }}

{{/* The time between the word to leave and SIGTERM. */}}
{{- define "deepseek-tgi.lifecycle" -}}
{{- with .Values.drain.preStopSeconds -}}
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30.0-0" $.Capabilities.KubeVersion.Version }}
    sleep:
      seconds: {{ . }}
    {{- else }}
    exec:
      command: [sleep, {{ . | quote }}]
    {{- end }}
{{- end }}
{{- end }}

{{/* All phases of an end, and what the server needs to say goodbye. */}}
{{- define "deepseek-tgi.gracePeriodSeconds" -}}
{{- with .Values.drain }}
{{- add .preStopSeconds .shutdownDelaySeconds .limitSeconds 10 }}
{{- end }}
{{- end }}

{{- define "deepseek-tgi.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if .Values.gpu.enabled }}
{{- $ranks := int .Values.model.tensorParallelSize }}
{{- $count := default $ranks (int .Values.gpu.count) }}
{{- if lt $count $ranks }}
{{- fail (printf "gpu.count: got %d, expected at least model.tensorParallelSize (%d), a device for each rank" $count $ranks) }}
{{- end }}
{{- $limits := merge (dict .Values.gpu.resourceName $count) (default (dict) $resources.limits) }}
{{- $_ := set $resources "limits" $limits }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "deepseek-tgi.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
- name: shm
  mountPath: /dev/shm
- name: models
  mountPath: /models
  {{- if and .Values.persistence.enabled .Values.persistence.readOnly }}
  readOnly: true
  {{- end }}
{{- if and .Values.grpc.enabled .Values.grpc.tls.existingSecret }}
- name: grpc-tls
  mountPath: /etc/deepseek-tgi/tls
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "deepseek-tgi.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmpSize }}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.cacheSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemorySize }}
- name: models
  {{- if .Values.persistence.enabled }}
  persistentVolumeClaim:
    claimName: {{ default (include "deepseek-tgi.fullname" .) .Values.persistence.existingClaim }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- if and .Values.grpc.enabled .Values.grpc.tls.existingSecret }}
- name: grpc-tls
  secret:
    secretName: {{ .Values.grpc.tls.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
