package kubenodes

import (
	"slices"
	"testing"
)

func TestCgroupMountsAreFound(t *testing.T) {
	for name, c := range map[string]struct {
		groups, mounts string
		want           []hierarchy
	}{
		"v1, with our group not the root in one hierarchy": {
			groups: "4:memory:/a/b\n3:cpu,cpuacct:/\n1:name=systemd:/\n0::/\n",
			mounts: `33 32 0:30 / /sys/fs/cgroup ro - tmpfs tmpfs ro
34 33 0:31 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
35 33 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
36 33 0:33 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
37 33 0:34 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
`,
			want: []hierarchy{{"/sys/fs/cgroup/memory/a/b", "memory"}, {"/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct"}, {"/sys/fs/cgroup/systemd", "name=systemd"}},
		},
		"v1 in a container, whose group is the root of the mount": {
			groups: "4:memory:/docker/1\n",
			mounts: "34 33 0:31 /docker/1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
			want:   []hierarchy{{"/sys/fs/cgroup/memory", "memory"}},
		},
		"v2": {
			groups: "0::/user.slice\n",
			mounts: "34 33 0:31 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
			want:   []hierarchy{{"/sys/fs/cgroup", "-"}},
		},
		"v2, with systemd's own hierarchy of v1": {
			groups: "1:name=systemd:/\n0::/\n",
			mounts: "34 33 0:31 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n36 33 0:33 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n",
			want:   []hierarchy{{"/sys/fs/cgroup", "-"}},
		},
		"none": {},
	} {
		if got := hierarchiesOf(c.groups, c.mounts); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
