// Package mandate decides, by votes of the nodes, which of several gateways may send to peers.
// A gateway that may send has a mandate. The package is a pure state machine: its caller,
// package voting, transmits messages, stores promises and supplies the time. Decision 23 has
// the reasons.
//
// Each node on a list has one vote, held by its route agent (Voter). A Gateway sends a request
// for the vote, called an ask, to all voters once per beat. It has a mandate while a majority
// answers, and sends nothing to peers without a mandate.
//
// # Rules
//
//  1. A voter keeps one Promise: epoch, holder and version of the list. Before it answers, it stores
//     a changed promise in a place that survives a reboot.
//  2. A voter that answers an ask of its holder stays bound to that gateway for Timing.Bound.
//     Meanwhile no other gateway gets the vote. A voter that starts is bound to its stored holder
//     for the same time.
//  3. A free voter accepts a higher epoch from any gateway; a bound voter accepts it only from its
//     holder. An ask gets no vote if its epoch is lower than the stored one, if its list is older
//     than the stored one, if it does not name the voter's incarnation, or if it is not newer than
//     the last ask of the same gateway.
//  4. An answered ask counts for the gateway until Timing.Mandate after it was sent. Timing.Mandate
//     is so much shorter than Timing.Bound that an answer never counts longer than it binds the
//     voter, even if the clocks of the two run at different rates.
//  5. A release by the holder frees the voter at once. The holder never uses the released epoch
//     again. It sends a release when it stops, and when its mandate has ended for lack of answers.
//  6. A voter that ends in an orderly way (SIGTERM) stores that it stays bound, and notifies its
//     holder. The holder counts that vote for Timing.EndedMandate. The next voter on that node
//     stays bound for Timing.EndedBound after its start, or until it answers an ask that names its
//     own incarnation. Such an ask shows that the holder knows the new voter, and counts its vote
//     like any other.
//  7. A voter without a stored promise cannot know to whom its node is bound. For
//     Timing.EndedBound, the longest time for which any gateway counts on the node, it votes only
//     for a gateway that already has a mandate.
//  8. Lists form a chain: each differs from the previous one by one voter. The holder proposes the
//     next list, and counts votes by the next list once a majority of the current list has stored
//     its version. Any other gateway asks with the newest list that it knows.
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
// successor had stored a newer version than L's, and by rule 3 refuses asks with L. The gateway
// with a mandate by L would still count older votes. But by rule 8 only that gateway could propose
// the next list, and it counts by the next list from then on. Any other gateway can get the votes
// only of free voters.
//
// Epochs order successive mandates, so that nodes and peers can follow the latest. Epochs alone do
// not exclude two mandates at the same time. A voter that lost its promise may accept a lower epoch
// than that of a mandate that ended more than Timing.EndedBound ago.
//
// The tests search the states of small systems with two gateways: with loss, delay, duplication
// and reordering of messages, paused hosts, and restarts. If any one of the rules is broken,
// they find two mandates. `go test -whole` searches more of the systems completely.
//
// # Outside this package
//
// Package internal/source/kube switches between votes and the Lease. With a list without voters, no
// gateway gets a mandate. One weakness remains: a delayed ask may reach a voter that has lost its
// promise, after the sender has lost its mandate. That voter then promises its vote by the ask's
// list, which may be old.
package mandate
