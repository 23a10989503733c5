package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/ping"
)

// up creates a lab for one test.
func up(t *testing.T, spec Spec) *Lab {
	t.Helper()
	if err := Available(); err != nil {
		t.Skip(err)
	}
	spec.Name = UniqueName("test")
	l, err := Up(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
		if left := traces(l.Name); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return l
}

// traces lists the remains of a lab: namespaces and its directory.
func traces(name string) []string {
	left := namespacesOf(name)
	if _, err := os.Stat(dirOf(name)); err == nil {
		left = append(left, dirOf(name))
	}
	return left
}

func mustPing(t *testing.T, from *Host, to netip.Addr) {
	t.Helper()
	if _, err := from.Ping(t.Context(), to); err != nil {
		t.Error(err)
	}
}

func TestEveryHostReachesItsOwnClusterAndTheUnderlay(t *testing.T) {
	for _, filter := range []RPFilter{RPFilterOff, RPFilterLoose, RPFilterStrict} {
		t.Run(string(filter), func(t *testing.T) {
			t.Parallel()
			l := up(t, Spec{RPFilter: filter, Clusters: []ClusterSpec{{Nodes: 3, PodsPerNode: 1}, {}}})
			a, b := l.Clusters[0], l.Clusters[1]
			inside := []*Host{a.OnPrem.Host}
			addrs := []netip.Addr{a.OnPrem.Addr}
			for _, n := range a.Nodes {
				inside, addrs = append(inside, n.Host), append(addrs, n.Addr)
			}
			for _, p := range a.Pods {
				inside, addrs = append(inside, p.Host), append(addrs, p.Addr)
			}
			for _, from := range inside {
				for _, to := range addrs {
					mustPing(t, from, to)
				}
			}
			for _, n := range a.Nodes {
				mustPing(t, n.Host, b.Gateway().Addr)
			}
		})
	}
}

func TestPodsAreNotReachableFromOtherClustersWithoutGateways(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(2)})
	a, b := l.Clusters[0], l.Clusters[1]
	o := PingOptions{Wait: 200 * time.Millisecond}
	if _, err := a.Pods[0].PingWith(t.Context(), b.Gateway().Addr, o); err == nil {
		t.Error("the underlay knows a way back to a pod")
	}
	if _, err := a.Pods[0].PingWith(t.Context(), netip.MustParseAddr("10.246.0.11"), o); err == nil {
		t.Error("somebody answers for a remote pod")
	}
}

func TestPingReportsICMPErrors(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(2)})
	a, b := l.Clusters[0], l.Clusters[1]
	var refused *ping.Error
	_, err := a.Gateway().PingWith(t.Context(), b.Gateway().Addr, PingOptions{TTL: 1})
	if !errors.As(err, &refused) || refused.Type != 11 || refused.From != netip.MustParseAddr("172.30.1.1") {
		t.Errorf("time exceeded at the router: got %v", err)
	}
	_, err = a.Gateway().PingWith(t.Context(), netip.MustParseAddr("10.99.0.1"), PingOptions{})
	if !errors.As(err, &refused) || refused.Type != 3 {
		t.Errorf("no route at the router: got %v", err)
	}
}

func TestCommandsAndSocketsRunInsideTheHost(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(1)})
	pod := l.Clusters[0].Pods[0]
	out, err := pod.Command(t.Context(), "cat", "/proc/self/net/fib_trie").Output()
	if err != nil || !strings.Contains(string(out), pod.Addr.String()) {
		t.Errorf("%v: %s", err, out)
	}
	_, err = pod.Command(t.Context(), "sh", "-c", "echo why it failed >&2; exit 3").Output()
	if err == nil || !strings.Contains(err.Error(), "why it failed") {
		t.Errorf("the error does not carry what the command said: %v", err)
	}
	if err := l.ServeHosts(); err != nil {
		t.Fatal(err)
	}
	got, err := l.Clusters[0].Pods[1].Get(t.Context(), "http://"+pod.Addr.String()+"/")
	if err != nil || got != "a-pod1 sees 10.244.0.12\n" {
		t.Errorf("%q, %v", got, err)
	}
	rate, err := l.Clusters[0].Pods[1].Download(t.Context(), pod.Addr, 64<<20, time.Minute)
	if err != nil || rate.Bytes != 64<<20 {
		t.Errorf("%+v, %v", rate, err)
	}
}

func TestDoKeepsTheMainThreadInItsNamespace(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(1)})
	// There are so many goroutines that the scheduler has to use every thread of the process.
	var group sync.WaitGroup
	for range 64 {
		group.Go(func() {
			err := l.Underlay.Do(func() error {
				time.Sleep(100 * time.Millisecond)
				if main, _ := nsfsInode("/proc/self/ns/net"); main != firstNetns {
					return errors.New("the process's main thread is in the lab")
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
}

func TestAllDevicesUseTheConfiguredMTU(t *testing.T) {
	l := up(t, Spec{MTU: 1280, Clusters: Clusters(2)})
	a, b := l.Clusters[0], l.Clusters[1]
	for _, h := range []*Host{l.Underlay, a.Gateway().Host, a.Pods[0].Host, a.OnPrem.Host} {
		k, err := openKernel(h)
		if err != nil {
			t.Fatal(err)
		}
		links, err := k.nl.LinkList()
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if name, mtu := link.Attrs().Name, link.Attrs().MTU; name != "lo" && mtu != 1280 {
				t.Errorf("%s: %s has MTU %d", h, name, mtu)
			}
		}
		k.close()
	}
	if _, err := a.Gateway().PingWith(t.Context(), b.Gateway().Addr, PingOptions{Size: 4000}); err != nil {
		t.Error("a ping in fragments: ", err)
	}
}

func TestTwoLabsRunSideBySide(t *testing.T) {
	one := up(t, Spec{Clusters: Clusters(2)})
	two := up(t, Spec{Clusters: Clusters(2)})
	for _, l := range []*Lab{one, two} {
		mustPing(t, l.Clusters[0].Gateway().Host, l.Clusters[1].Gateway().Addr)
	}
	if err := one.Down(); err != nil {
		t.Fatal(err)
	}
	mustPing(t, two.Clusters[0].Gateway().Host, two.Clusters[1].Gateway().Addr)
	if err := one.Down(); err != nil {
		t.Errorf("a second Down: %v", err)
	}
}

func TestDownKillsProcessesThatIgnoreSIGTERM(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(1)})
	cmd := l.Clusters[0].Pods[0].Command(context.Background(), "sh", "-c", "trap '' TERM; sleep 1000 & wait; wait")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	time.Sleep(50 * time.Millisecond)
	if err := l.Down(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err == nil {
			t.Error("it ended by itself")
		}
	case <-time.After(time.Minute):
		t.Error("the process lives on")
	}
}

func TestLabIsProtectedWhileItsOwnerRuns(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(1)})
	if _, err := Up(t.Context(), Spec{Name: l.Name, Clusters: Clusters(1)}); !errors.Is(err, ErrInUse) {
		t.Errorf("a second lab of that name: %v", err)
	}
	opened, err := Open(l.Name)
	if err != nil {
		t.Fatal(err)
	}
	mustPing(t, opened.Clusters[0].Pods[0].Host, opened.Clusters[0].Pods[1].Addr)
	if err := opened.Down(); !errors.Is(err, ErrInUse) {
		t.Errorf("Down by somebody else: %v", err)
	}
	if err := Sweep(); err != nil {
		t.Error(err)
	}
	mustPing(t, l.Clusters[0].Pods[0].Host, l.Clusters[0].Pods[1].Addr)
}

func TestPersistentLabOutlivesItsOwnerUntilDown(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(1)})
	if err := l.Persist(); err != nil {
		t.Fatal(err)
	}
	l.owner.Close() // releases the lock, as the end of the process does
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	if _, err := Up(t.Context(), Spec{Name: l.Name, Clusters: Clusters(1)}); !errors.Is(err, ErrExists) {
		t.Errorf("Up over a persistent lab: %v", err)
	}
	opened, err := Open(l.Name)
	if err != nil {
		t.Fatal(err)
	}
	mustPing(t, opened.Clusters[0].Pods[0].Host, opened.Clusters[0].Pods[1].Addr)
	if err := opened.Down(); err != nil {
		t.Error(err)
	}
	if _, err := Open(l.Name); !errors.Is(err, ErrNotFound) {
		t.Errorf("Open after Down: %v", err)
	}
}

func TestPersistentLabOfAnEarlierBootIsSwept(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(1)})
	l.state.Boot = "another"
	if err := l.Persist(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(l.Name); !errors.Is(err, ErrNotFound) {
		t.Errorf("opened: %v", err)
	}
	l.owner.Close()
	l.owner = nil
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	if left := traces(l.Name); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// ownerEnv makes this test binary the owner of a lab, for TestUpRemovesTheLabOfAKilledOwner.
const ownerEnv = "ISTHMUS_LAB_TEST_OWNER"

func TestUpRemovesTheLabOfAKilledOwner(t *testing.T) {
	if err := Available(); err != nil {
		t.Skip(err)
	}
	if name := os.Getenv(ownerEnv); name != "" {
		l, err := Up(context.Background(), Spec{Name: name, Clusters: Clusters(2)})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Clusters[0].Pods[0].Command(context.Background(), "sleep", "1000").Start(); err != nil {
			t.Fatal(err)
		}
		fmt.Println("up")
		select {}
	}
	name := UniqueName("killed")
	bystander := up(t, Spec{Clusters: Clusters(1)})
	owner := bystander.Underlay.Command(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	owner.Env = append(os.Environ(), ownerEnv+"="+name)
	stdout, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	word := make([]byte, 3)
	if _, err := stdout.Read(word); err != nil || string(word) != "up\n" {
		t.Fatalf("%q, %v", word, err)
	}
	if err := Sweep(); err != nil || len(traces(name)) == 0 {
		t.Fatalf("swept the lab of a live owner (%v)", err)
	}
	var left crowd
	err = locked(func() error { // under the lock, so that no other process can sweep this lab before the test has looked at it
		if err := owner.Process.Kill(); err != nil {
			return err
		}
		if err := owner.Wait(); err == nil {
			return errors.New("the owner ended by itself")
		}
		if left = crowdOf(name); len(traces(name)) == 0 || len(left.members()) != 1 {
			return fmt.Errorf("the killed owner should have left its lab with one process: %v, %v", traces(name), left.members())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	up(t, Spec{Clusters: Clusters(1)})
	if left := traces(name); len(left) > 0 {
		t.Errorf("left of the dead owner's lab: %v", left)
	}
	if left := left.members(); len(left) > 0 {
		t.Errorf("processes left of the dead owner's lab: %v", left)
	}
}

func TestSweepRemovesNamespacesWithoutState(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(1)})
	l.owner.Close()
	l.owner = nil
	if err := os.RemoveAll(l.Dir); err != nil {
		t.Fatal(err)
	}
	// A crash between creating the name and mounting the namespace leaves an empty file.
	if err := os.WriteFile(filepath.Join(netnsDir, netnsPrefix+l.Name+".half"), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	if left := traces(l.Name); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestFailedUpLeavesNothing(t *testing.T) {
	if err := Available(); err != nil {
		t.Skip(err)
	}
	name := UniqueName("fails")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Up(ctx, Spec{Name: name, Clusters: Clusters(2)}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if left := traces(name); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// If ip-netns(8) finds that the directory of names is not a mount point, it binds the directory
// to itself. Namespaces mounted in it before are then hidden below the new mount. The test does
// this with a directory of its own.
func TestNamespaceHiddenByAnotherMountCanBeRemoved(t *testing.T) {
	if err := Available(); err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "isthmus.lab.host")
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := onOwnThread(func() error {
		if err := newNamespace(); err != nil {
			return err
		}
		return unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
	}); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(dir, "somebody's")
	if err := os.WriteFile(other, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		_ = unix.Unmount(path, unix.MNT_DETACH)
	})
	if err := removeNamespace(path); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the name is left: %v", err)
	}
	var stat unix.Stat_t
	if err := unix.Stat(other, &stat); err != nil {
		t.Errorf("what was beside it: %v", err)
	}
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		t.Errorf("the directory's own mount is gone, though it is not ours: %v", err)
	}
	if _, ok := nsfsInode(path); ok {
		t.Error("the namespace is mounted still, below")
	}
	if err := removeNamespace(path); err != nil {
		t.Errorf("again: %v", err)
	}
}
