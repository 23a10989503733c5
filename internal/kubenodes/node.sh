# This script runs one node of a cluster, with a PID namespace of its own. Package kubenodes starts it
# in the node's network namespace. It has three stages: "node" joins the node's control groups, then becomes
# unshare(1); "mounts" makes the node's view of the file system; "supervise" is process 1.
#
# NODE is the node's name, DIR its folder on disk, BIN the programs of Kubernetes, CGROUPS the control
# groups to join ("DIRECTORY=CONTROLLERS" each, "-" for cgroup v2), CNI the folder of plugins.
set -eu

case $1 in
node)
	for c in $CGROUPS; do
		echo 0 >"${c%%=*}/cgroup.procs"
	done
	# --kill-child: the end of this process ends the node with all its pods.
	exec unshare --mount --pid --fork --kill-child --uts --ipc --cgroup sh "$DIR/node.sh" mounts
	;;
mounts)
	hostname "$NODE"
	mount -t proc proc /proc
	mount -t sysfs sysfs /sys
	case $CGROUPS in
	*=-)
		mount -t cgroup2 cgroup2 /sys/fs/cgroup
		# A group that contains processes cannot enable controllers for its children.
		mkdir /sys/fs/cgroup/init
		while read -r pid; do
			echo "$pid" >/sys/fs/cgroup/init/cgroup.procs 2>/dev/null || true # the process has ended
		done </sys/fs/cgroup/cgroup.procs
		sed 's/\([a-z]\+\)/+\1/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
		;;
	*)
		mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
		for c in $CGROUPS; do
			controllers=${c#*=}
			case $c in
			*=name=*) directory=/sys/fs/cgroup/${controllers#name=} ;;
			*) directory=/sys/fs/cgroup/$controllers ;;
			esac
			mkdir "$directory"
			mount -t cgroup -o "$controllers" cgroup "$directory"
		done
		;;
	esac
	mount -t tmpfs -o mode=755 tmpfs /run
	# The node writes to tmpfs, and the machine's files do not change.
	for d in etc opt var; do
		mkdir -p /run/node/$d/upper /run/node/$d/work
		mount -t overlay -o "lowerdir=/$d,upperdir=/run/node/$d/upper,workdir=/run/node/$d/work" overlay /$d
	done
	mkdir -p "$DIR/containerd" "$DIR/kubelet" /var/lib/containerd /var/lib/kubelet /var/log/pods /var/log/containers /etc/cni/net.d
	mount --bind "$DIR/containerd" /var/lib/containerd
	mount --bind "$DIR/kubelet" /var/lib/kubelet
	rm -f /etc/cni/net.d/*
	cp "$DIR/10-bridge.conflist" /etc/cni/net.d/
	# kubelet requires these kernel settings. They belong to the machine, so kubelet reads files instead.
	mkdir -p /run/node/sys
	for s in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
		kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
		file=/run/node/sys/$(echo "${s%%=*}" | tr / _)
		echo "${s#*=}" >"$file"
		mount --bind "$file" "/proc/sys/${s%%=*}"
	done
	mount --make-rshared /
	exec sh "$DIR/node.sh" supervise
	;;
supervise)
	run() { # NAME COMMAND...: starts the command again whenever it ends
		name=$1
		shift
		while :; do
			"$@" >>"$DIR/$name.log" 2>&1 </dev/null || true
			sleep 0.5
		done
	}
	run containerd containerd --config "$DIR/containerd.toml" &
	until [ -S /run/containerd/containerd.sock ]; do sleep 0.05; done
	run kube-proxy "$BIN/kube-proxy" --config="$DIR/kube-proxy.yaml" &
	# kubelet starts when the images exist, because there is no registry to pull them from.
	until [ -e "$DIR/images-loaded" ]; do sleep 0.1; done
	run kubelet "$BIN/kubelet" --config="$DIR/kubelet.yaml" --kubeconfig="$DIR/kubelet.kubeconfig" \
		--hostname-override="$NODE" --node-ip="$ADDRESS" &
	while :; do
		wait || true
		sleep 1
	done
	;;
esac
