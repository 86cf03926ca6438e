//! Properties of the planner under random use.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::entry::is_same;
use super::tests::{LIMITS, answer, deliver, now, offer, request, sampled, sitter, whom};
use super::*;
use crate::generate::{Failure, Output};

#[derive(Debug, Clone)]
enum Action {
    Join(i32),
    /// Seat, family, length, greedy, requests.
    Enter(usize, u32, u32, bool, usize),
    Take,
    /// Which running request ends, and whether well.
    End(usize, bool),
    /// Which running request begins.
    Begin(usize),
    /// So many seconds pass, then time limits are looked at.
    EndOverdue(u64),
    Withdraw(usize),
    Leave(usize),
    SettleAny(usize),
}

const TIME_LIMIT: Duration = Duration::from_secs(10);

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let enter = (0usize..6, 0u32..3, 1u32..40, any::<bool>(), 1usize..4)
        .prop_map(|(seat, family, len, greedy, num)| Action::Enter(seat, family, len, greedy, num));
    let action = prop_oneof![
        2 => (-1i32..2).prop_map(Action::Join),
        12 => enter,
        4 => Just(Action::Take),
        8 => (any::<usize>(), any::<bool>()).prop_map(|(which, well)| Action::End(which, well)),
        8 => any::<usize>().prop_map(Action::Begin),
        4 => (0u64..8).prop_map(Action::EndOverdue),
        1 => (0usize..6).prop_map(Action::Withdraw),
        1 => (0usize..6).prop_map(Action::Leave),
        1 => (0usize..40).prop_map(Action::SettleAny),
    ];
    prop::collection::vec(action, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Every item that stays gets the last output of each of its requests, once, and nothing
    /// after it, or hears that it is overdue, when something of it began that long ago and has
    /// not ended; the bounds hold; equal greedy requests are never twice in the window; in the end
    /// nothing is left behind.
    #[test]
    fn every_item_gets_exactly_one_outcome(actions in actions()) {
        let mut planner = Planner::new(LIMITS);
        let mut seats: Vec<Ticket> = Vec::new();
        // Last outputs that an item still waits for.
        let mut open: BTreeMap<(Ticket, u32), usize> = BTreeMap::new();
        let mut running: Vec<Request> = Vec::new();
        let mut next_bit = 0;
        let mut clock = Instant::now();
        let mut begun: BTreeMap<RequestId, Instant> = BTreeMap::new();
        let mut entry_of: BTreeMap<RequestId, EntryId> = BTreeMap::new();
        let ending = std::iter::repeat_n([Action::Take, Action::End(0, true)], 500).flatten();
        for action in actions.into_iter().chain(ending) {
            match action {
                Action::Join(priority) => seats.push(planner.join(sitter(priority))),
                Action::Enter(seat, family, len, greedy, num) if !seats.is_empty() => {
                    let seat = seats[seat % seats.len()];
                    let temperature = if greedy { 0.0 } else { 1.0 };
                    let offer = offer(next_bit, (0..num).map(|_| request(family, len, temperature)).collect());
                    if planner.enter(seat, offer, now()).is_ok() {
                        open.insert((seat, next_bit), num);
                    }
                    next_bit += 1;
                }
                Action::Take => {
                    let taken = planner.take(now());
                    entry_of.extend(taken.iter().map(|request| (request.id, planner.routes[&request.id].entry)));
                    running.extend(taken);
                }
                Action::Begin(which) if !running.is_empty() => {
                    let id = running[which % running.len()].id;
                    begun.entry(id).or_insert(clock);
                    let mut deliveries = Deliveries::new();
                    planner.receive(Output::Begun { id }, clock, &mut deliveries);
                    prop_assert!(deliveries.is_empty());
                }
                Action::EndOverdue(seconds) => {
                    clock += Duration::from_secs(seconds);
                    let mut deliveries = Deliveries::new();
                    let cancelled = planner.end_overdue(clock, TIME_LIMIT, &mut deliveries);
                    let age = |id: &RequestId| begun.get(id).map(|&at| clock - at);
                    let is_late = |id: &RequestId| age(id).is_some_and(|age| age > TIME_LIMIT);
                    for id in &cancelled {
                        let mut open = running.iter().filter(|request| entry_of[&request.id] == entry_of[id]);
                        prop_assert!(open.any(|request| is_late(&request.id)), "nothing of it ran for so long");
                    }
                    running.retain(|request| !cancelled.contains(&request.id));
                    for late in running.iter().filter(|request| is_late(&request.id)) {
                        let mut others = entry_of.iter().filter(|(_, entry)| **entry == entry_of[&late.id]);
                        let is_spared = others.any(|(id, _)| age(id).is_some_and(|age| age <= TIME_LIMIT));
                        prop_assert!(is_spared, "it runs on and on");
                    }
                    for (seat, deliveries) in deliveries {
                        for Delivery { bit, event, .. } in deliveries {
                            prop_assert!(matches!(event, Event::Overdue));
                            prop_assert!(open.remove(&(seat, bit)).is_some());
                        }
                    }
                }
                Action::End(which, well) if !running.is_empty() => {
                    let request = running.swap_remove(which % running.len());
                    let failure = Failure::Cancelled;
                    let output = if well { answer(request.id) } else { Output::Failed { id: request.id, failure } };
                    for (seat, bit, _) in deliver(&mut planner, [output]) {
                        let left = open.get_mut(&(seat, bit));
                        let left = left.expect("nothing comes for an item that has everything or is gone");
                        *left -= 1;
                        if *left == 0 {
                            open.remove(&(seat, bit));
                        }
                    }
                }
                Action::Withdraw(seat) if !seats.is_empty() => {
                    let seat = seats[seat % seats.len()];
                    let (bits, cancelled) = planner.withdraw(seat);
                    prop_assert!(cancelled.iter().all(|id| !begun.contains_key(id)), "it was running");
                    running.retain(|request| !cancelled.contains(&request.id));
                    for bit in bits {
                        prop_assert!(open.remove(&(seat, bit)).is_some());
                    }
                }
                Action::Leave(seat) if !seats.is_empty() => {
                    let seat = seats.swap_remove(seat % seats.len());
                    let cancelled = planner.leave(seat);
                    running.retain(|request| !cancelled.contains(&request.id));
                    open.retain(|(of, _), _| *of != seat);
                }
                Action::SettleAny(which) => {
                    let Some((&(seat, bit), _)) = open.iter().nth(which) else { continue };
                    let cancelled = planner.settle(seat, bit);
                    running.retain(|request| !cancelled.contains(&request.id));
                    open.remove(&(seat, bit));
                }
                _ => {}
            }
            prop_assert!(planner.entries.len() <= LIMITS.items_max as usize);
            prop_assert!(running.len() <= LIMITS.requests_max as usize || planner.counts().running == 1);
            prop_assert_eq!(running.len(), planner.routes.len());
            let greedy: Vec<_> = planner.entries.values().filter(|entry| entry.merge.is_some()).collect();
            for (index, entry) in greedy.iter().enumerate() {
                let twin = greedy[..index].iter().find(|twin| is_same(&twin.requests[0].input, &entry.requests[0].input));
                prop_assert!(twin.is_none(), "the same work twice");
            }
        }
        prop_assert!(open.is_empty(), "without an answer: {:?}", open);
        prop_assert!(planner.entries.is_empty() && planner.merges.is_empty() && planner.routes.is_empty());
        prop_assert_eq!(planner.num_bytes, 0);
        prop_assert!(planner.seats.values().all(|seat| seat.entries.is_empty()));
    }

    /// The order in which items come into the window does not change the order in which they run.
    #[test]
    fn order_within_the_window_does_not_depend_on_arrival(
        items in prop::collection::vec((0u32..3, 1u32..60, -1i32..2), 1..30),
        shuffle in prop::collection::vec(any::<u64>(), 30),
    ) {
        let sitters: BTreeMap<i32, Sitter> = (-1..2).map(|priority| (priority, sitter(priority))).collect();
        let run = |order: &[usize]| {
            let mut planner = Planner::new(PlannerLimits { items_max: 64, requests_max: 1, ..LIMITS });
            let seats: BTreeMap<i32, Ticket> =
                sitters.iter().map(|(&priority, &sitter)| (priority, planner.join(sitter))).collect();
            for &item in order {
                let (family, len, priority) = items[item];
                planner.enter(seats[&priority], sampled(item as u32, family, len), now()).unwrap();
            }
            let mut ran = Vec::new();
            while let [request] = planner.take(now()).as_slice() {
                ran.extend(deliver(&mut planner, [answer(request.id)]).iter().map(|(_, bit, _)| *bit));
            }
            ran
        };
        let mut order: Vec<usize> = (0..items.len()).collect();
        let first = run(&order);
        order.sort_by_key(|&item| shuffle[item]);
        prop_assert_eq!(first.len(), items.len());
        prop_assert_eq!(run(&order), first);
    }

    /// Whatever comes later and goes before it, an item waits for a bounded number of others.
    #[test]
    fn no_item_waits_without_bound(family in 0u32..3, len in 1u32..40, rivals in prop::collection::vec(0u32..3, 1..8)) {
        let mut planner = Planner::new(PlannerLimits { requests_max: 1, ..LIMITS });
        let (patient, urgent) = (planner.join(sitter(5)), planner.join(sitter(-5)));
        planner.enter(patient, sampled(0, family, len), now()).unwrap();
        let bound = (WINDOWS_PASSED_OVER_MAX + 1) * u64::from(LIMITS.items_max);
        let mut bit = 1;
        for num_before in 0.. {
            prop_assert!(num_before <= bound, "it waits for ever");
            // The window is always full of what goes first.
            while planner.enter(urgent, sampled(bit, rivals[bit as usize % rivals.len()], 90), now()).is_ok() {
                bit += 1;
            }
            let [request] = planner.take(now()).try_into().unwrap();
            if whom(&deliver(&mut planner, [answer(request.id)])) == [(patient, 0)] {
                break;
            }
        }
    }
}
