package natengine

import "unsafe"

// pool is an array of values, numbered from 1; number 0 means no value. The pool grows by one chunk
// at a time and never moves a value, so no caller waits for a copy of the whole pool.
type pool[T any] struct {
	chunks []*[poolChunk]T
	used   uint32
}

const poolChunk = 64

func (p *pool[T]) at(number uint32) *T { return &p.chunks[(number-1)/poolChunk][(number-1)%poolChunk] }

// add appends a zero value to the pool, and returns the value's number.
func (p *pool[T]) add() uint32 {
	if p.used%poolChunk == 0 {
		p.chunks = append(p.chunks, new([poolChunk]T))
	}
	p.used++
	return p.used
}

func (p *pool[T]) bytes() int {
	return len(p.chunks)*int(unsafe.Sizeof([poolChunk]T{})) + cap(p.chunks)*8
}

// chains is a hash table of the numbers of values, with chaining. It has sixteen parts, which grow
// one at a time, as the shards of index do.
type chains struct {
	parts [1 << (64 - shardShift)]struct {
		heads []uint32
		live  int
	}
}

// chained holds the values whose numbers are in a chains table. It computes the hash of a value. It
// also stores, for each value, the number of the next value in the same chain.
type chained interface {
	hash(number uint32) uint64
	next(number uint32) *uint32 // the next number in the chain
}

// firstNumber returns the first number in the chain for hash h, or 0 if the chain is empty.
func (c *chains) firstNumber(h uint64) uint32 {
	heads := c.parts[h>>shardShift].heads
	if len(heads) == 0 {
		return 0
	}
	return heads[h&uint64(len(heads)-1)]
}

// insert adds the number of a value whose hash is h.
func (c *chains) insert(owner chained, number uint32, h uint64) {
	p := &c.parts[h>>shardShift]
	if p.live++; p.live > 2*len(p.heads) {
		old := p.heads
		p.heads = make([]uint32, max(8, 2*len(old)))
		for _, i := range old {
			for i != 0 {
				next := owner.next(i)
				following := *next
				at := &p.heads[owner.hash(i)&uint64(len(p.heads)-1)]
				*next, *at = *at, i
				i = following
			}
		}
	}
	at := &p.heads[h&uint64(len(p.heads)-1)]
	*owner.next(number), *at = *at, number
}

// remove deletes a number that was inserted with hash h.
func (c *chains) remove(owner chained, number uint32, h uint64) {
	p := &c.parts[h>>shardShift]
	at := &p.heads[h&uint64(len(p.heads)-1)]
	for *at != number {
		at = owner.next(*at)
	}
	*at = *owner.next(number)
	p.live--
}

func (c *chains) bytes() (n int) {
	for i := range c.parts {
		n += cap(c.parts[i].heads) * 4
	}
	return n
}
