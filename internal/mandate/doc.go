// Package mandate decides which of several gateways may send to peers, by votes of the nodes. It is a pure
// state machine: the caller carries messages, stores promises and passes the time. See decision 23.
//
// Each node of a list has one vote, held by its route agent (Voter). A Gateway asks all voters once a beat.
// It has a mandate while a majority answers, and is mute without one.
//
// # Rules
//
//  1. A voter keeps one Promise: epoch, holder and version of the list. It stores a changed promise before
//     it answers, where a reboot does not lose it.
//  2. A voter that answers an ask of its holder stays bound to it for Timing.Bound. Meanwhile no other
//     gateway gets the vote. A voter that starts is bound to its stored holder for as long.
//  3. A free voter takes a higher epoch from any gateway; a bound one takes it from its holder alone. An ask
//     with a lower epoch, or an older list than the stored one, gets no vote. Nor does one that does not name the
//     voter's incarnation, or that is not newer than the last one of the same gateway.
//  4. An answered ask counts for the gateway until Timing.Mandate after it was sent. That is shorter than
//     Timing.Bound, by more than two clocks can differ in that time.
//  5. A release by the holder frees the voter at once. The holder never uses that epoch again. It sends one when it stops,
//     and when its mandate has ended for want of answers.
//  6. A voter that ends in order (SIGTERM) stores that it stays bound, and tells its holder, which counts the vote for
//     Timing.FarewellMandate. The next voter on that node keeps to it for Timing.Farewell after its start, or until
//     it answers an ask that names it. By then its holder knows it, and counts the vote like any other.
//  7. A voter without a stored promise cannot know to whom its node is bound. For Timing.Farewell, the longest time
//     that anybody counts on it, it votes only for a gateway that has a mandate already.
//  8. Lists form a chain: each differs from the one before by one voter. The holder proposes the next, and
//     counts by it once a majority of the present list has stored its version. A gateway that is not the
//     holder asks by the newest list that it knows.
//
// # Why there are never two mandates
//
// Let two gateways have mandates at one moment, by lists L and M of the chain. If L and M are equal, or
// neighbours, each majority of one has a voter in common with each majority of the other. That voter answered
// both within Timing.Mandate, so it was bound to one when it answered the other, against rules 2 and 3; after
// a restart rules 2 and 6 say the same, and where the promise was lost rule 7. If M is two or more steps after L, a list
// between them was in force: a majority of L's successor had stored a newer version than L's, and by rule 3
// refuses asks by L. The holder by L would still count votes from before, but rule 8 lets only the holder
// propose, and it counts by the new list itself from then on; another gateway needs voters that were free.
//
// Epochs give an order to successive mandates, so that nodes and peers can follow the latest. They are not
// what excludes two. A voter that lost its promise may accept an epoch that is lower than one of a mandate that
// ended more than Timing.Farewell ago.
//
// The tests search the states of small systems of two gateways: with loss, delay, duplication and reordering of
// messages, hosts that pause, and restarts. They find a mandate too many when a rule is left out. `go test -whole`
// searches more of them to the end.
//
// # What is not here
//
// The change between votes and the Lease alone: see internal/source/kube. A list without voters gives nobody a mandate. An
// ask that was under way for so long that its sender has lost its mandate since, and that reaches a voter without a promise,
// makes that voter promise by an old list.
package mandate
