// Package mandate decides, by votes of the nodes, which of several gateways may send to peers.
// A gateway that may send has a mandate. The package is a pure state machine: its caller,
// package voting, transmits messages, stores promises and supplies the time. Decision 23 has
// the reasons.
//
// Each node on a list has one vote, which its route agent (Voter) casts. Each start of a voter has
// a random number, its incarnation. Once per beat, a Gateway sends a message, called an ask, to all
// voters. If it claims a mandate, its asks request the votes for an epoch, the number of the
// mandate. It has the mandate while a majority grants the vote, and sends nothing to peers without
// a mandate.
//
// # Rules
//
//  1. A voter keeps one Promise: epoch, holder and version of the list. The holder is the gateway
//     that got the vote. If the promise changes, the voter stores it in a place that survives a
//     reboot before it answers.
//  2. A voter that grants an ask stays bound to its holder for Timing.Bound. Meanwhile no other
//     gateway gets the vote. A voter that starts is bound to the stored holder for the same time.
//  3. A voter that is not bound accepts a higher epoch from any gateway. A bound voter accepts it
//     only from its holder. An ask gets no vote if its epoch is lower than the stored one, if its
//     list is older than the stored one, if it does not name the voter's incarnation, or if it is
//     not newer than the last granted ask of the same gateway.
//  4. A granted ask counts for the gateway until Timing.Mandate after the ask was sent.
//     Timing.Mandate is shorter than Timing.Bound. So a vote never counts longer than it binds the
//     voter, even if the clocks of the two hosts run at somewhat different rates.
//  5. A release by the holder frees the voter at once. The holder never uses the released epoch
//     again. It sends a release when it stops, and when its mandate has ended for lack of answers.
//  6. A voter that ends in an orderly way (SIGTERM) stores that it stays bound, and notifies its
//     holder. The holder counts that vote for Timing.EndedMandate. The next voter on that node
//     stays bound until it grants an ask that names its own incarnation, but at most for
//     Timing.EndedBound after its start. Such an ask shows that the holder has an answer of the new
//     voter, whose vote it counts like any other.
//  7. A voter without a stored promise may follow a voter that was bound to a gateway. For
//     Timing.EndedBound, which is longer than any gateway counts an earlier vote, it votes only for
//     a gateway that already has a mandate.
//  8. Lists form a chain: each differs from the previous one by one voter. The holder proposes the
//     next list, and counts votes by the next list once a majority of the current list has stored
//     its version. Any other gateway sends asks with the newest list that it has read.
//
// # Why there are never two mandates
//
// Suppose that two gateways have mandates at one moment, by lists L and M of the chain. If L
// and M are equal, or neighbours, each majority of L has a voter in common with each majority
// of M. That voter answered both gateways within Timing.Mandate. So it was bound to one gateway
// when it answered the other, against rules 2 and 3. After a restart the contradiction follows
// from rules 2 and 6, and after the loss of the promise from rule 7.
//
// If M is two or more steps after L, a list between them was in force. Then a majority of L's
// successor had stored a newer version than L's, and by rule 3 refuses asks with L. So a mandate by
// L could rest only on older votes. But by rule 8, only the gateway with these votes could propose
// the next list, and from then on it counts by the next list. Any other gateway can get votes only
// from free voters.
//
// Epochs order successive mandates, so that nodes and peers can follow the latest one. They do not
// exclude two mandates at the same time. A voter that lost its promise may accept an epoch that is
// lower than the epoch of an earlier mandate, if that mandate ended more than Timing.EndedBound
// ago.
//
// The tests search the states of small systems with two gateways: with loss, delay, duplication
// and reordering of messages, paused hosts, and restarts. If any one of the rules is broken,
// they find two mandates. `go test -whole` searches more of the systems completely.
//
// # Outside this package
//
// Package internal/source/kube switches between votes and the Lease. While the list has no voters,
// no gateway gets a mandate. One weakness remains: a voter that has lost its promise may receive a
// delayed ask of a gateway whose mandate has ended. That voter then votes by the list of the ask,
// which may be old.
package mandate
