{{- define "deepseek-tgi.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "deepseek-tgi.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* A name with a suffix that a long name does not cost: (list context "suffix"). */}}
{{- define "deepseek-tgi.suffixed" -}}
{{- $suffix := index . 1 }}
{{- printf "%s-%s" (include "deepseek-tgi.fullname" (index . 0) | trunc (int (sub 62 (len $suffix))) | trimSuffix "-") $suffix }}
{{- end }}

{{- define "deepseek-tgi.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "deepseek-tgi.labels" -}}
helm.sh/chart: {{ include "deepseek-tgi.chart" . }}
{{ include "deepseek-tgi.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "deepseek-tgi.selectorLabels" -}}
app.kubernetes.io/name: {{ include "deepseek-tgi.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "deepseek-tgi.serviceAccountName" -}}
{{- $made := ternary (include "deepseek-tgi.fullname" .) "default" .Values.serviceAccount.create }}
{{- default $made .Values.serviceAccount.name }}
{{- end }}

{{- define "deepseek-tgi.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What Pod Security "restricted" asks of a pod. */}}
{{- define "deepseek-tgi.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.security }}
{{- if not (kindIs "invalid" .runAsUser) }}
runAsUser: {{ .runAsUser | int64 }}
{{- end }}
{{- if not (kindIs "invalid" .runAsGroup) }}
runAsGroup: {{ .runAsGroup | int64 }}
{{- end }}
{{- if not (kindIs "invalid" .fsGroup) }}
fsGroup: {{ .fsGroup | int64 }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* What Pod Security "restricted" asks of a container, and a root that cannot be written. */}}
{{- define "deepseek-tgi.containerSecurityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
{{- end }}

{{/* One variable from a secret, if one is named: (list "NAME" reference). */}}
{{- define "deepseek-tgi.secretEnv" -}}
{{- $reference := index . 1 }}
{{- if $reference.existingSecret }}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ $reference.existingSecret }}
      key: {{ $reference.key }}
{{- end }}
{{- end }}
