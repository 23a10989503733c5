package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"

	nfnl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// Constants of linux/netfilter/nf_tables.h, Linux 5.12 and later.
const (
	tableIsOwned = 0x2 // NFT_TABLE_F_OWNER
	tableOwner   = 0x7 // NFTA_TABLE_OWNER: port of the netlink socket that owns the table
)

// lock makes sure that only one process with the given Owner runs in the network namespace of the
// calling thread. It returns ErrOther if another process holds the lock. It logs a warning about a
// missing kernel feature only if warn is true. Closing the lock, or any end of the process,
// releases the lock.
//
// The lock is an empty nftables table that belongs to a netlink socket. Only a process with
// CAP_NET_ADMIN in the namespace can make such a table. No other process can change or remove it
// (`nft flush ruleset` skips it). The kernel removes it when the socket is closed.
func lock(owner kernel.Owner, log *slog.Logger, warn bool) (io.Closer, error) {
	c, err := nfnl.Dial(unix.NETLINK_NETFILTER, nil)
	if err == nil {
		if err = ownTable(c, owner); err == nil {
			return c, nil
		}
		_ = c.Close()
	}
	if errors.Is(err, ErrOther) {
		return nil, err
	}
	if warn {
		log.Warn("nftables of Linux 5.12 or later is missing: other processes can hide a second instance from this one", "error", err)
	}
	return lockAddress(owner, log)
}

func ownTable(c *nfnl.Conn, owner kernel.Owner) (err error) {
	for range 3 { // an existing table may disappear meanwhile
		if err = inTransaction(c, 0, tableMessage(unix.NFT_MSG_NEWTABLE, owner.Lock)); err == nil {
			return nil
		}
		port, queryErr := tableHolder(c, owner.Lock)
		switch {
		case errors.Is(queryErr, unix.ENOENT):
		case queryErr != nil:
			return err
		case port == 0: // the table was made by hand, without an owner
			return inTransaction(c, 0, tableMessage(unix.NFT_MSG_DELTABLE, owner.Lock), tableMessage(unix.NFT_MSG_NEWTABLE, owner.Lock))
		case int32(port) > 0: // the first socket of a process has its process ID as port
			return fmt.Errorf("%w %s (process %d) runs in this network namespace", ErrOther, owner.Name, port)
		default:
			return fmt.Errorf("%w %s runs in this network namespace", ErrOther, owner.Name)
		}
	}
	return err
}

// tableMessage returns a message about a table of family inet.
func tableMessage(kind nfnl.HeaderType, name string) nfnl.Message {
	attributes := []nfnl.Attribute{{Type: unix.NFTA_TABLE_NAME, Data: append([]byte(name), 0)}}
	flags := nfnl.Request | nfnl.Acknowledge
	if kind == unix.NFT_MSG_NEWTABLE {
		attributes = append(attributes, nfnl.Attribute{Type: unix.NFTA_TABLE_FLAGS, Data: binary.BigEndian.AppendUint32(nil, tableIsOwned)})
		flags |= nfnl.Create | nfnl.Excl
	}
	text, err := nfnl.MarshalAttributes(attributes)
	if err != nil {
		panic(err) // the name exceeds the size of an attribute
	}
	return nfnl.Message{Header: nfnl.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | kind, Flags: flags},
		Data: append([]byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}, text...)}
}

// batchGeneration is NFNL_BATCH_GENID of linux/netfilter/nfnetlink.h, Linux 4.10 and later.
const batchGeneration = 1

// inTransaction sends messages of which the kernel carries out all or none. Each message must
// request an acknowledgement. If the tables of the namespace have another generation, the kernel
// carries out none, and the error is unix.ERESTART. A generation of 0 means any.
func inTransaction(c *nfnl.Conn, generation uint32, messages ...nfnl.Message) error {
	edge := func(kind nfnl.HeaderType) nfnl.Message {
		return nfnl.Message{Header: nfnl.Header{Type: kind, Flags: nfnl.Request}, Data: []byte{0, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}}
	}
	begin := edge(unix.NFNL_MSG_BATCH_BEGIN)
	if generation != 0 {
		begin.Data = binary.NativeEndian.AppendUint16(begin.Data, unix.SizeofNlAttr+4)
		begin.Data = binary.NativeEndian.AppendUint16(begin.Data, batchGeneration)
		begin.Data = binary.BigEndian.AppendUint32(begin.Data, generation)
	}
	all := append([]nfnl.Message{begin}, messages...)
	if _, err := c.SendMessages(append(all, edge(unix.NFNL_MSG_BATCH_END))); err != nil {
		return err
	}
	for range messages {
		if _, err := c.Receive(); err != nil {
			return err
		}
	}
	return nil
}

// tableHolder returns the port of the socket that owns a table, or 0 if the table has no owner.
func tableHolder(c *nfnl.Conn, name string) (port uint32, err error) {
	request := tableMessage(unix.NFT_MSG_GETTABLE, name)
	request.Header.Flags = nfnl.Request
	answers, err := c.Execute(request)
	if err != nil {
		return 0, err
	}
	for _, m := range answers {
		if len(m.Data) < 4 {
			continue
		}
		attributes, err := nfnl.UnmarshalAttributes(m.Data[4:])
		if err != nil {
			return 0, err
		}
		for _, a := range attributes {
			if a.Type == tableOwner && len(a.Data) == 4 {
				port = binary.BigEndian.Uint32(a.Data)
			}
		}
	}
	return port, nil
}

// lockAddress is the lock for kernels that do not support tables with an owner. It binds an
// abstract Unix address. Any user can bind that address, so only a process of root or of our own
// user counts as a holder. If another user has bound the address, this process continues without a
// lock. The missing lock does harm only if two instances run.
func lockAddress(owner kernel.Owner, log *slog.Logger) (io.Closer, error) {
	at := &net.UnixAddr{Name: "@" + owner.Lock, Net: "unix"}
	l, err := net.ListenUnix("unix", at)
	if err == nil {
		return l, nil
	}
	if !errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("lock of the network namespace: %w", err)
	}
	holder, err := listenerOf(at)
	if err == nil && (holder.Uid == 0 || int(holder.Uid) == os.Geteuid()) {
		return nil, fmt.Errorf("%w %s (process %d) runs in this network namespace", ErrOther, owner.Name, holder.Pid)
	}
	args := []any{"address", at.Name, "error", err}
	if err == nil {
		args = []any{"address", at.Name, "process", holder.Pid, "user", holder.Uid}
	}
	log.Error("another user's process holds the lock of this network namespace; continuing without the lock", args...)
	return io.NopCloser(nil), nil
}

// listenerOf returns the credentials of the process that listens at an address.
func listenerOf(at *net.UnixAddr) (cred *unix.Ucred, err error) {
	c, err := net.DialUnix("unix", nil, at)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	failed := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return cred, errors.Join(failed, err)
}
