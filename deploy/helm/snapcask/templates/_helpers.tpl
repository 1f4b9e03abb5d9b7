{{/* Names */}}
{{- define "snapcask.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "snapcask.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "snapcask.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "snapcask.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The service account of a component: dict "root" $ "component" "node" */}}
{{- define "snapcask.serviceAccount" -}}
{{- $account := (get .root.Values .component).serviceAccount -}}
{{- if $account.create -}}
{{- default (printf "%s-%s" (include "snapcask.fullname" .root) .component) $account.name -}}
{{- else -}}
{{- required (printf "%s.serviceAccount.name: name the account, or let the chart create it" .component) $account.name -}}
{{- end -}}
{{- end -}}

{{/* Labels: dict "root" $ "component" "node", or without component for what all share. `more`, if
there is any, goes before commonLabels. */}}
{{- define "snapcask.selector" -}}
app.kubernetes.io/name: {{ include "snapcask.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "snapcask.moreLabels" -}}
{{- $all := deepCopy .root.Values.commonLabels -}}
{{- range $key, $value := .more -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- with $all }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of Pods; nothing that changes with the chart's version alone, which would restart them */}}
{{- define "snapcask.podLabels" -}}
{{ include "snapcask.selector" . }}
{{- include "snapcask.moreLabels" . }}
{{- end -}}

{{- define "snapcask.labels" -}}
{{ include "snapcask.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- include "snapcask.moreLabels" . }}
{{- end -}}

{{/* An image with its tag or digest */}}
{{- define "snapcask.image" -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag }}{{- end -}}
{{- end -}}

{{- define "snapcask.driverImage" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository: name where you pushed the image built from deploy/container/Containerfile" $image.repository -}}
{{- include "snapcask.image" (dict "repository" $repository "digest" $image.digest "tag" (default .Chart.AppVersion $image.tag)) -}}
{{- end -}}

{{/* Bytes, of a number or of text such as 128Mi: dict "value" VALUE "key" KEY "least" TEXT */}}
{{- define "snapcask.bytes" -}}
{{- $factors := dict "" 1 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $text := ternary .value (printf "%.0f" (float64 .value)) (kindIs "string" .value) -}}
{{- $number := regexFind "^[0-9]+" $text -}}
{{- $factor := get $factors (regexFind "[A-Za-z]*$" $text) -}}
{{- if ge (mulf (float64 $number) $factor) 9.2e18 -}}
{{- fail (printf "%s: %s is too large" .key $text) -}}
{{- end -}}
{{- $bytes := mul (int64 $number) (int64 $factor) -}}
{{- with .least -}}
{{- if lt $bytes (include "snapcask.bytes" (dict "value" .) | int64) -}}
{{- fail (printf "%s: %s is less than %s" $.key $text .) -}}
{{- end -}}
{{- end -}}
{{- $bytes -}}
{{- end -}}

{{/* The driver's configuration. It is given the folder of Pods alone, the only one it mounts in. */}}
{{- define "snapcask.config" -}}
{{- $values := .Values -}}
{{- include "snapcask.checks" . -}}
{{- $cache := omit $values.cache "hostPathType" "disksHostPathType" "maxBytes" "scrubBytesPerSecond" -}}
{{- $cache = set $cache "scrubBytesPerSecond" (include "snapcask.bytes" (dict "value" $values.cache.scrubBytesPerSecond "key" "cache.scrubBytesPerSecond" "least" "1Mi") | int64) -}}
{{- if $values.cache.maxBytes -}}
{{- $cache = set $cache "maxBytes" (include "snapcask.bytes" (dict "value" $values.cache.maxBytes "key" "cache.maxBytes") | int64) -}}
{{- end -}}
{{- $fetch := omit $values.fetch "maxMemoryBytes" -}}
{{- $fetch = set $fetch "maxMemoryBytes" (include "snapcask.bytes" (dict "value" $values.fetch.maxMemoryBytes "key" "fetch.maxMemoryBytes" "least" "6Mi") | int64) -}}
{{- $config := dict
  "driverName" $values.driverName
  "kubeletDir" (printf "%s/pods" $values.kubeletDir)
  "logLevel" $values.logLevel
  "stores" $values.stores
  "allowPodStores" $values.allowPodStores
  "policy" $values.policy
  "cache" $cache
  "mount" $values.mount
  "fetch" $fetch
  "kubernetes" (pick $values.kubernetes "events" "removeTaint")
-}}
{{- with $values.defaultStore -}}
{{- $config = set $config "defaultStore" . -}}
{{- end -}}
{{- if $values.metrics.enabled -}}
{{- $config = set $config "metricsAddress" (printf ":%d" (int $values.metrics.port)) -}}
{{- end -}}
{{- toPrettyJson $config -}}
{{- end -}}

{{/* Variables of the driver's container: dict "root" $ "secret" NAME */}}
{{- define "snapcask.env" -}}
{{- with .secret }}
- name: AWS_ACCESS_KEY_ID
  valueFrom: {secretKeyRef: {name: {{ . }}, key: accessKeyId}}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: secretAccessKey}}
- name: AWS_SESSION_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: sessionToken, optional: true}}
{{- end }}
{{- if .root.Values.credentials.file.existingSecret }}
- name: AWS_SHARED_CREDENTIALS_FILE
  value: /etc/snapcask/credentials/credentials
{{- end }}
{{- if .root.Values.caBundle.existingConfigMap }}
- name: AWS_CA_BUNDLE
  value: /etc/snapcask/trust/ca.crt
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Files that the driver reads, in its container and as volumes */}}
{{- define "snapcask.fileMounts" -}}
- name: config
  mountPath: /etc/snapcask/config
  readOnly: true
{{- if .Values.credentials.file.existingSecret }}
- name: credentials
  mountPath: /etc/snapcask/credentials
  readOnly: true
{{- end }}
{{- if .Values.caBundle.existingConfigMap }}
- name: trust
  mountPath: /etc/snapcask/trust
  readOnly: true
{{- end }}
- name: tmp
  mountPath: /tmp
{{- end -}}

{{- define "snapcask.fileVolumes" -}}
- name: config
  configMap:
    name: {{ include "snapcask.fullname" . }}
- name: tmp
  emptyDir: {}
{{- with .Values.credentials.file }}
{{- if .existingSecret }}
- name: credentials
  secret:
    secretName: {{ .existingSecret }}
    items:
      - key: {{ .key }}
        path: credentials
{{- end }}
{{- end }}
{{- with .Values.caBundle }}
{{- if .existingConfigMap }}
- name: trust
  configMap:
    name: {{ .existingConfigMap }}
    items:
      - key: {{ .key }}
        path: ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{/* The Kubernetes API's token, for those containers alone that use it. */}}
{{- define "snapcask.tokenMount" -}}
- name: api-token
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end -}}

{{- define "snapcask.tokenVolume" -}}
- name: api-token
  projected:
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3607
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end -}}

{{/* What a sidecar may do: nothing */}}
{{- define "snapcask.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The sidecar that asks the driver whether it lives, and the driver's probes. */}}
{{- define "snapcask.livenessSidecar" -}}
- name: liveness-probe
  image: {{ include "snapcask.image" .Values.sidecars.livenessProbe.image }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - --csi-address=/csi/csi.sock
    - --http-endpoint=:{{ .Values.ports.liveness }}
  resources:
    {{- toYaml .Values.sidecars.livenessProbe.resources | nindent 4 }}
  volumeMounts:
    - name: socket
      mountPath: /csi
{{- end -}}

{{- define "snapcask.probes" -}}
# Taking up what an earlier driver left can take a while on a node with many volumes.
startupProbe:
  httpGet:
    path: /healthz
    port: healthz
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet:
    path: /healthz
    port: healthz
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet:
    {{- if .Values.metrics.enabled }}
    path: /readyz
    port: metrics
    {{- else }}
    path: /healthz
    port: healthz
    {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
ports:
  - name: healthz
    containerPort: {{ .Values.ports.liveness }}
  {{- if .Values.metrics.enabled }}
  - name: metrics
    containerPort: {{ .Values.metrics.port }}
  {{- end }}
{{- end -}}
