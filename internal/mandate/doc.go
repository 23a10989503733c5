// Package mandate decides by votes of the nodes which of several gateways may send to peers. It is
// a pure state machine: the caller carries messages, stores promises and passes the time. Package
// voting is the caller. See decision 23.
//
// Each node of a list has one vote, held by its route agent (Voter). A Gateway asks all voters once
// a beat. It has a mandate while a majority answers, and sends nothing to peers without one.
//
// # Rules
//
//  1. A voter keeps one Promise: epoch, holder and version of the list. It stores a changed promise
//     before it answers, where a reboot does not lose it.
//  2. A voter that answers an ask of its holder stays bound to it for Timing.Bound. Meanwhile no
//     other gateway gets the vote. A voter that starts is bound to its stored holder for as long.
//  3. A free voter accepts a higher epoch from any gateway; a bound one only from its holder. An
//     ask with a lower epoch, or an older list than the stored one, gets no vote. Nor does an ask
//     that does not name the voter's incarnation, or that is not newer than the last one of the
//     same gateway.
//  4. An answered ask counts for the gateway until Timing.Mandate after it was sent. That is
//     shorter than Timing.Bound, by more than two clocks can differ in that time.
//  5. A release by the holder frees the voter at once. The holder never uses that epoch again. It
//     sends a release when it stops, and when its mandate has ended for lack of answers.
//  6. A voter that ends in order (SIGTERM) stores that it stays bound, and tells its holder, which
//     counts the vote for Timing.FarewellMandate. The next voter on that node stays bound for
//     Timing.Farewell after its start, or until it answers an ask that names it. By then its holder
//     knows it, and counts the vote like any other.
//  7. A voter without a stored promise cannot know to whom its node is bound. For Timing.Farewell,
//     the longest time for which any gateway counts on the node, it votes only for a gateway that
//     already has a mandate.
//  8. Lists form a chain: each differs from the previous one by one voter. The holder proposes the
//     next list, and counts by it once a majority of the present list has stored its version.
//     Another gateway asks by the newest list that it knows.
//
// # Why there are never two mandates
//
// Let two gateways have mandates at one moment, by lists L and M of the chain. If L and M are
// equal, or neighbours, each majority of one has a voter in common with each majority of the other.
// That voter answered both within Timing.Mandate, so it was bound to one when it answered the
// other, against rules 2 and 3. After a restart this follows from rules 2 and 6, and after the loss
// of the promise from rule 7.
//
// If M is two or more steps after L, a list between them was in force. Then a majority of L's
// successor had stored a newer version than L's, and by rule 3 refuses asks by L. The holder by L
// would still count older votes, but by rule 8 only the holder proposes the next list, and it
// counts by that from then on. Another gateway needs voters that were free.
//
// Epochs order successive mandates, so that nodes and peers can follow the latest. They do not
// exclude two mandates. A voter that lost its promise may accept an epoch lower than that of a
// mandate which ended more than Timing.Farewell ago.
//
// The tests search the states of small systems of two gateways: with loss, delay, duplication and
// reordering of messages, paused hosts, and restarts. Without any one of the rules they find two
// mandates. `go test -whole` searches more of the systems to the end.
//
// # What is not here
//
// The change between votes and the Lease: see internal/source/kube. A list without voters gives
// nobody a mandate. One weakness remains: an ask may be under way until its sender has lost its
// mandate, and reach a voter without a promise. It makes that voter promise by an old list.
package mandate
