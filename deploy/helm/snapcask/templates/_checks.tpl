{{/*
What values.schema.json can't say. Renders nothing; fails, naming the key, for values that the API
server or the driver would refuse, which would stop a rollout half-way.
*/}}
{{- define "snapcask.checks" -}}
{{- include "snapcask.checkDriver" . -}}
{{- include "snapcask.checkPaths" . -}}
{{- include "snapcask.checkPorts" . -}}
{{- include "snapcask.checkVolumes" . -}}
{{- include "snapcask.checkClasses" . -}}
{{- if and .Values.sidecars.snapshotter.enabled (not .Values.controller.enabled) -}}
{{- fail "sidecars.snapshotter needs the controller: set controller.enabled" -}}
{{- end -}}
{{- end -}}

{{/* What only the driver would refuse */}}
{{- define "snapcask.checkDriver" -}}
{{- if not .Values.stores -}}
{{- fail "stores: name at least one, for example --set stores.main.url=s3://bucket/prefix" -}}
{{- end -}}
{{- with .Values.defaultStore -}}
{{- if not (hasKey $.Values.stores .) -}}
{{- fail (printf "defaultStore: %s is not one of stores" .) -}}
{{- end -}}
{{- end -}}
{{- with .Values.kubernetes.removeTaint -}}
{{- $key := regexFind "^[^:=]*" . -}}
{{- if ne $key . -}}
{{- fail (printf "kubernetes.removeTaint: give the key of the taint alone, %s without %s" $key (trimPrefix $key .)) -}}
{{- end -}}
{{- end -}}
{{- if lt (float64 .Values.cache.endFree) (float64 .Values.cache.beginFree) -}}
{{- fail "cache.endFree is less than cache.beginFree" -}}
{{- end -}}
{{- end -}}

{{/* Folders of the host that would hide what the driver's container needs */}}
{{- define "snapcask.checkPaths" -}}
{{- $cache := .Values.cache.path -}}
{{- $pods := printf "%s/pods" .Values.kubeletDir -}}
{{- $own := list $pods "/bin" "/csi" "/dev" "/etc/snapcask" "/lib" "/lib64" "/opt/snapcask" "/proc" "/run" "/sbin" "/sys" "/tmp" "/usr" "/var/run" -}}
{{- range $i, $path := prepend .Values.cache.disks $cache -}}
{{- $key := ternary "cache.disks" "cache.path" (gt $i 0) -}}
{{- range $own -}}
{{- if hasPrefix (printf "%s/" $path) (printf "%s/" .) -}}
{{- fail (printf "%s: %s holds %s, which the driver needs; name another folder" $key $path .) -}}
{{- end -}}
{{- end -}}
{{- range list $pods "/csi" "/dev" "/etc/snapcask" "/proc" "/sys" "/var/run/secrets" -}}
{{- if hasPrefix (printf "%s/" .) $path -}}
{{- fail (printf "%s: %s is within %s; name another folder" $key $path .) -}}
{{- end -}}
{{- end -}}
{{- if and (gt $i 0) (hasPrefix (printf "%s/" $cache) (printf "%s/" $path)) -}}
{{- fail (printf "cache.disks: %s is within the cache itself" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* No two of one Pod listen on one port */}}
{{- define "snapcask.checkPorts" -}}
{{- $ports := .Values.ports -}}
{{- $both := list (list "ports.liveness" $ports.liveness) -}}
{{- if .Values.metrics.enabled -}}
{{- $both = append $both (list "metrics.port" .Values.metrics.port) -}}
{{- end -}}
{{- include "snapcask.checkUnique" (append $both (list "ports.registrar" $ports.registrar)) -}}
{{- if .Values.controller.enabled -}}
{{- $both = append $both (list "ports.provisioner" $ports.provisioner) -}}
{{- if .Values.sidecars.snapshotter.enabled -}}
{{- $both = append $both (list "ports.snapshotter" $ports.snapshotter) -}}
{{- end -}}
{{- include "snapcask.checkUnique" $both -}}
{{- end -}}
{{- end -}}

{{/* Pairs of a key and a value: no two have one value */}}
{{- define "snapcask.checkUnique" -}}
{{- $seen := dict -}}
{{- range . -}}
{{- $value := toString (last .) -}}
{{- if hasKey $seen $value -}}
{{- fail (printf "%s and %s are both %s; change one" (get $seen $value) (first .) $value) -}}
{{- end -}}
{{- $_ := set $seen $value (first .) -}}
{{- end -}}
{{- end -}}

{{/* Volumes of others beside those of the chart */}}
{{- define "snapcask.checkVolumes" -}}
{{- $shared := list "api-token" "config" "credentials" "socket" "tmp" "trust" -}}
{{- $places := list "/csi" "/etc/snapcask/config" "/etc/snapcask/credentials" "/etc/snapcask/trust" "/tmp" -}}
{{- range $component := list "node" "controller" -}}
{{- $values := get $.Values $component -}}
{{- $names := $shared -}}
{{- $mounts := append $places "/var/run/secrets/kubernetes.io/serviceaccount" -}}
{{- if eq $component "node" -}}
{{- $names = concat $names (list "cache" "pods" "registration") -}}
{{- range $i, $path := $.Values.cache.disks -}}
{{- $names = append $names (printf "disk-%d" $i) -}}
{{- end -}}
{{- $mounts = concat $mounts (list (printf "%s/pods" $.Values.kubeletDir) $.Values.cache.path) $.Values.cache.disks -}}
{{- end -}}
{{- $volumes := list -}}
{{- range $names -}}
{{- $volumes = append $volumes (list "a volume of the chart" .) -}}
{{- end -}}
{{- range $i, $volume := $values.extraVolumes -}}
{{- $volumes = append $volumes (list (printf "%s.extraVolumes[%d].name" $component $i) $volume.name) -}}
{{- end -}}
{{- include "snapcask.checkUnique" $volumes -}}
{{- $paths := list -}}
{{- range $mounts -}}
{{- $paths = append $paths (list "a mountPath of the chart" .) -}}
{{- end -}}
{{- range $i, $mount := $values.extraVolumeMounts -}}
{{- $paths = append $paths (list (printf "%s.extraVolumeMounts[%d].mountPath" $component $i) $mount.mountPath) -}}
{{- end -}}
{{- include "snapcask.checkUnique" $paths -}}
{{- end -}}
{{- end -}}

{{/* StorageClasses: each of a name of its own, and nothing in one that could never be mounted */}}
{{- define "snapcask.checkClasses" -}}
{{- $names := list -}}
{{- $modes := append (values .Values.mount.namespaces) .Values.mount.mode -}}
{{- range $i, $class := .Values.storageClasses -}}
{{- $key := printf "storageClasses[%d]" $i -}}
{{- $names = append $names (list (printf "%s.name" $key) $class.name) -}}
{{- $given := default dict $class.parameters -}}
{{- $only := ternary (keys $.Values.stores | first) "" (eq (len $.Values.stores) 1) -}}
{{- $store := coalesce $given.store $.Values.defaultStore $only -}}
{{- if and $store (not (hasKey $.Values.stores $store)) -}}
{{- fail (printf "%s.parameters.store: %s is not one of stores" $key $store) -}}
{{- end -}}
{{- if and $given.image (not $store) -}}
{{- fail (printf "%s.parameters.store: name one, since there are several and no defaultStore" $key) -}}
{{- end -}}
{{- if and $store $class.nodePublishSecret (not (hasPrefix "s3://" (lower (get $.Values.stores $store).url))) -}}
{{- fail (printf "%s.nodePublishSecret: store %s takes no Secret; it is a directory" $key $store) -}}
{{- end -}}
{{- $possible := ternary (list $given.mountMode) $modes (hasKey $given "mountMode") -}}
{{- if and (or $given.uid $given.gid $given.mode) (not (has "overlay" $possible)) -}}
{{- fail (printf "%s.parameters: uid, gid and mode need the mount mode overlay, not bind" $key) -}}
{{- end -}}
{{- end -}}
{{- include "snapcask.checkUnique" $names -}}
{{- if and .Values.storageClasses (not (has "Persistent" .Values.csiDriver.volumeLifecycleModes)) -}}
{{- fail "storageClasses need Persistent among csiDriver.volumeLifecycleModes" -}}
{{- end -}}
{{- end -}}
