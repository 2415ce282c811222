//! What every gather and every sum over several hosts promises: each row crosses the network once a host, comes to each
//! rank once or is added once, and no rank waits for another in a circle. (If all ranks get few sums, each row crosses it
//! once a rank.)

use std::collections::{HashMap, HashSet, VecDeque};

use gemmesh::Config;
use gemmesh::DType;
use gemmesh::error::Kind;
use gemmesh::schedule::MAX_WORLD;
use gemmesh::schedule::plan::matrices::{A, OUT, PARTIALS};
use gemmesh::schedule::plan::{over_hosts, plan};
use gemmesh::schedule::{
    Addend, Counts, HostSum, Hosts, Layout, MAX_FLAGS, Operation, Problem, Reduction, Region,
    RowOrder, Schedule, Sum, Transfer,
};
use gemmesh::tuning::{Chunking, Route, TileShape};
use proptest::prelude::*;
use proptest::sample::select;

/// A gather over hosts.
#[derive(Clone, Debug)]
struct Case {
    /// By rank: its host.
    hosts: Vec<usize>,
    rows: Vec<usize>,
    stages: usize,
    order: RowOrder,
    operation: Operation,
    config: Config,
}

/// Wide enough for a shard of 2048 rows to cross the network in four chunks.
const K: usize = 2048;

impl Case {
    fn problem(&self) -> Problem {
        let layout = Layout::new(&self.rows, K).unwrap();
        let layout = layout.staged(self.stages, self.order).unwrap();
        let n = if self.operation == Operation::ALL_GATHER_MATMUL {
            64
        } else {
            0
        };
        Problem {
            hosts: Hosts::of(&self.hosts).unwrap(),
            ..Problem::new(self.operation, DType::Bf16, layout, n)
        }
    }

    fn schedules(&self) -> Vec<Schedule> {
        let problem = self.problem();
        let ranks = 0..self.hosts.len();
        ranks
            .map(|rank| plan(&problem, rank, self.config).unwrap())
            .collect()
    }
}

/// Up to 64 ranks on hosts of as many places, numbered in any order.
fn cases() -> impl Strategy<Value = Case> {
    let extents = (1..=8usize, 1..=8usize).prop_filter("ranks", |(h, d)| h * d <= MAX_WORLD);
    extents.prop_flat_map(|(hosts, places)| {
        let world = hosts * places;
        let numbered: Vec<usize> = (0..world).map(|rank| rank / places).collect();
        let rows = prop_oneof![3 => 0..300usize, 1 => Just(0), 1 => 1024..2100usize];
        let routes = select(vec![Route::Pull, Route::Push, Route::Store]);
        let operations = select(vec![Operation::ALL_GATHER, Operation::ALL_GATHER_MATMUL]);
        let orders = select(vec![RowOrder::ByRank, RowOrder::ByStage]);
        (
            Just(numbered).prop_shuffle(),
            prop::collection::vec(rows, world),
            1..=3usize,
            orders,
            operations,
            (routes, 1..=4usize),
        )
            .prop_map(
                |(hosts, rows, stages, order, operation, (route, chunks))| Case {
                    hosts,
                    rows,
                    stages,
                    order,
                    operation,
                    config: Config::new(TileShape::new(128, 64, 64), Chunking::new(chunks), route),
                },
            )
    })
}

/// By (sender, receiver, flag) the transfers of all ranks, as those have them to whom they come, and as those who move or
/// send them.
fn by_ends(schedules: &[Schedule]) -> [HashMap<(usize, usize, usize), &Transfer>; 2] {
    let key = |moved: &Transfer| (moved.from, moved.to, moved.flag);
    let come = schedules.iter().flat_map(|schedule| schedule.arrivals());
    let moved = schedules
        .iter()
        .flat_map(|schedule| schedule.moves().chain(schedule.sent()));
    [
        come.map(|come| (key(come), come)).collect(),
        moved.map(|moved| (key(moved), moved)).collect(),
    ]
}

/// Plays all ranks' transfers over the network turn by turn, as a library does that sends and receives at the same time.
/// A rank's turn ends when all of it has been sent and received. Returns how many turns never end.
fn stuck_turns(schedules: &[Schedule]) -> usize {
    let turns = |schedule: &Schedule| schedule.turns().map(|turn| turn.number).collect();
    let mut left: Vec<VecDeque<usize>> = schedules.iter().map(turns).collect();
    loop {
        let now: Vec<Option<usize>> = left.iter().map(|turns| turns.front().copied()).collect();
        // A transfer is made when it is both ranks' turn. Those that have been made are behind the other rank's turn.
        let is_made = |moved: &Transfer, other: usize| now[other].is_none_or(|at| at >= moved.turn);
        let mut any = false;
        for (rank, schedule) in schedules.iter().enumerate() {
            let Some(turn) = now[rank] else { continue };
            let mut sent = schedule.sent().filter(|moved| moved.turn == turn);
            let mut received = schedule.received().filter(|moved| moved.turn == turn);
            if sent.all(|moved| is_made(moved, moved.to))
                && received.all(|moved| is_made(moved, moved.from))
            {
                left[rank].pop_front();
                any = true;
            }
        }
        if !any {
            return left.iter().map(VecDeque::len).sum();
        }
    }
}

/// Of an odd number of transfers of the last step from one rank to another the last is alone, and both ranks know it.
fn alone_alike(schedules: &[Schedule]) -> bool {
    let step = |moved: &Transfer| moved.turn / (MAX_FLAGS + 1);
    let sent = || schedules.iter().flat_map(|schedule| schedule.sent());
    let last = sent().map(step).max();
    let mut of_last: HashMap<(usize, usize), Vec<usize>> = HashMap::new();
    for moved in sent().filter(|moved| moved.last_step) {
        if Some(step(moved)) != last {
            return false;
        }
        let turns = of_last.entry((moved.from, moved.to)).or_default();
        turns.push(moved.turn);
    }
    let odd = of_last.iter().filter(|(_, turns)| turns.len() % 2 == 1);
    let expected: HashSet<_> = odd
        .map(|(&(from, to), turns)| (from, to, turns.iter().max().copied()))
        .collect();
    let turns = || schedules.iter().flat_map(|schedule| schedule.turns());
    let ends = |moved: &Transfer| (moved.from, moved.to, Some(moved.turn));
    let sent = turns().filter(|turn| turn.sends_alone);
    let received = turns().filter(|turn| turn.receives_alone);
    let sent: HashSet<_> = sent.filter_map(|turn| turn.sent.map(ends)).collect();
    let received: HashSet<_> = received
        .filter_map(|turn| turn.received.map(ends))
        .collect();
    sent == expected && received == expected
}

/// What a rank has on a lane at a turn: the ranks of what it sends and receives there.
struct OnLane {
    turn: usize,
    peers: Vec<usize>,
    /// Whether it is the other lane's turn, of which this one has a half.
    is_half: bool,
}

/// What a rank has on its two lanes, if each message that is alone goes in halves.
fn lanes_of(schedule: &Schedule) -> [VecDeque<OnLane>; 2] {
    let mut lanes = [VecDeque::new(), VecDeque::new()];
    for turn in schedule.turns() {
        let both = [
            (turn.sent.map(|moved| moved.to), turn.sends_alone),
            (turn.received.map(|moved| moved.from), turn.receives_alone),
        ];
        let on_lane = |is_half: bool| OnLane {
            turn: turn.number,
            peers: both
                .into_iter()
                .filter(|(_, is_alone)| *is_alone || !is_half)
                .filter_map(|(peer, _)| peer)
                .collect(),
            is_half,
        };
        lanes[turn.number % 2].push_back(on_lane(false));
        if turn.sends_alone || turn.receives_alone {
            lanes[1 - turn.number % 2].push_back(on_lane(true));
        }
    }
    lanes
}

/// Plays all ranks' lanes. A lane begins with a half when the other lane is at its turn, and that turn ends after the half.
/// A message ends when both ranks have begun with it. Returns how many never end.
fn stuck_on_lanes(schedules: &[Schedule]) -> usize {
    let mut left: Vec<[VecDeque<OnLane>; 2]> = schedules.iter().map(lanes_of).collect();
    let front = |left: &[[VecDeque<OnLane>; 2]], rank: usize, lane: usize| {
        let first = left[rank][lane].front();
        first.map(|first| (first.turn, first.is_half))
    };
    loop {
        let mut any = false;
        for (rank, lane) in (0..left.len()).flat_map(|rank| [(rank, 0), (rank, 1)]) {
            let has_begun = |rank: usize, turn: usize| match front(&left, rank, lane) {
                Some((at, _)) if at < turn => false,
                Some((at, true)) if at == turn => {
                    front(&left, rank, 1 - lane) == Some((turn, false))
                }
                // Or it has ended.
                _ => true,
            };
            let ends = left[rank][lane].front().is_some_and(|first| {
                let mut beside = left[rank][1 - lane].iter();
                let awaits_half = !first.is_half && beside.any(|half| half.turn == first.turn);
                let mut both = first.peers.iter().chain([&rank]);
                !awaits_half && both.all(|&rank| has_begun(rank, first.turn))
            });
            if ends {
                left[rank][lane].pop_front();
                any = true;
            }
        }
        if !any {
            return left.iter().flatten().map(VecDeque::len).sum();
        }
    }
}

/// Each rank sends by increasing turns and receives by increasing turns, and turns end.
fn has_turns(schedules: &[Schedule]) -> bool {
    let increase = |turns: Vec<usize>| turns.windows(2).all(|pair| pair[0] < pair[1]);
    let all_increase = schedules.iter().all(|schedule| {
        increase(schedule.sent().map(|moved| moved.turn).collect())
            && increase(schedule.received().map(|moved| moved.turn).collect())
            && schedule.moves().all(|moved| moved.turn == 0)
    });
    let is_stuck = stuck_turns(schedules) + stuck_on_lanes(schedules) > 0;
    all_increase && !is_stuck && alone_alike(schedules)
}

/// Plays all ranks' transfers, each rank's in its order, and each after the chunks that it waits for. Over the network a
/// rank sends one at a time, and only what the other rank receives next. Returns how many are never made.
fn stuck(schedules: &[Schedule]) -> usize {
    let mut left: Vec<_> = schedules.iter().map(|s| s.moves().peekable()).collect();
    let mut sent: Vec<_> = schedules.iter().map(|s| s.sent().peekable()).collect();
    let mut received: Vec<_> = schedules.iter().map(|s| s.received().peekable()).collect();
    let mut come: HashSet<(usize, usize)> = HashSet::new();
    loop {
        let mut moved_any = false;
        for sends in &mut sent {
            while let Some(next) = sends.next_if(|next| received[next.to].peek() == Some(next)) {
                received[next.to].next();
                come.insert((next.to, next.flag));
                moved_any = true;
            }
        }
        for moves in &mut left {
            while let Some(next) = moves.next_if(|next| {
                next.after
                    .clone()
                    .all(|flag| come.contains(&(next.mover(), flag)))
            }) {
                come.insert((next.to, next.flag));
                moved_any = true;
            }
        }
        if !moved_any {
            let left = left.into_iter().map(Iterator::count).sum::<usize>();
            return left + sent.into_iter().map(Iterator::count).sum::<usize>();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn each_row_comes_once_and_crosses_the_network_once_a_host(case in cases()) {
        let (problem, schedules) = (case.problem(), case.schedules());
        let m = problem.layout.m();
        let mut crossings: HashMap<(usize, usize), usize> = HashMap::new();
        for (rank, schedule) in schedules.iter().enumerate() {
            let mut come = vec![0; m];
            for row in problem.layout.rows_in_memory(rank).into_iter().flatten() {
                come[row] += 1;
            }
            for arrival in schedule.arrivals() {
                prop_assert_eq!(arrival.to, rank);
                let regions = arrival.regions.iter().map(|moved| &moved.to);
                let rows = regions.filter(|region| region.matrix == A && region.columns.start == 0);
                for row in rows.flat_map(|region| region.rows.clone()) {
                    come[row] += 1;
                    if case.hosts[arrival.from] != case.hosts[rank] {
                        prop_assert_eq!(arrival.from, arrival.source);
                        *crossings.entry((row, case.hosts[rank])).or_default() += 1;
                    }
                }
            }
            prop_assert!(come.iter().all(|&times| times == 1), "rank {}: {:?}", rank, come);
        }
        prop_assert!(crossings.values().all(|&times| times == 1));
        prop_assert_eq!(crossings.len(), m * (problem.hosts.count() - 1));
    }

    #[test]
    fn a_rank_sends_over_its_rail_alone_and_passes_on_to_neighbours_alone(case in cases()) {
        let hosts = case.problem().hosts;
        for (rank, schedule) in case.schedules().iter().enumerate() {
            let rail: HashSet<usize> = hosts.rail(rank).collect();
            let crosses = |moved: &&Transfer| case.hosts[moved.from] != case.hosts[moved.to];
            prop_assert!(!schedule.moves().any(|moved| crosses(&moved)));
            prop_assert!(schedule.sent().chain(schedule.received()).all(|moved| crosses(&moved)));
            for moved in schedule.moves().chain(schedule.sent()) {
                let (from, to) = (moved.from, moved.to);
                match case.hosts[from] == case.hosts[to] {
                    true => prop_assert!(moved.source == from || rail.contains(&moved.source)),
                    false => prop_assert!(moved.source == from && rail.contains(&to)),
                }
                let is_passed_on = moved.source != from;
                prop_assert_eq!(moved.after.len(), usize::from(is_passed_on));
                if let (true, flag) = (is_passed_on, moved.after.start) {
                    let first = schedule.arrivals().iter().find(|arrival| arrival.flag == flag);
                    prop_assert_eq!(&first.unwrap().regions, &moved.regions);
                }
            }
        }
    }

    #[test]
    fn both_ends_have_the_same_transfers_and_none_waits_in_a_circle(case in cases()) {
        let schedules = case.schedules();
        let [come, moved] = by_ends(&schedules);
        prop_assert_eq!(come, moved);
        prop_assert_eq!(stuck(&schedules), 0);
        prop_assert!(has_turns(&schedules));
        let agreed: HashSet<_> = schedules.iter().map(|s| format!("{:?}", s.agreed())).collect();
        prop_assert_eq!(agreed.len(), 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn blocks_and_a_root_s_rows_come_to_every_rank(case in cases(), root in any::<prop::sample::Index>()) {
        let hosts = Hosts::of(&case.hosts).unwrap();
        let world = case.hosts.len();
        let root = root.index(world);
        let mut of_root = vec![0; world];
        of_root[root] = case.rows[root];
        let all: usize = case.rows.iter().sum();
        // How many rows come to a rank.
        let come_to = |operation: Operation, rank: usize| match operation {
            Operation::BROADCAST => case.rows[root] * usize::from(rank != root),
            _ => all,
        };
        for (operation, rows) in [
            (Operation::ALL_TO_ALL, &case.rows),
            (Operation::BROADCAST, &of_root),
        ] {
            let problem = Problem {
                hosts: hosts.clone(),
                ..Problem::new(operation, DType::Bf16, Layout::new(rows, K).unwrap(), K)
            };
            let config = case.config.with_route(Route::Push);
            let schedules: Vec<_> = (0..world)
                .map(|rank| plan(&problem, rank, config).unwrap())
                .collect();
            let [come, moved] = by_ends(&schedules);
            prop_assert_eq!(come, moved);
            prop_assert_eq!(stuck(&schedules), 0);
            prop_assert!(has_turns(&schedules));
            for schedule in &schedules {
                let came = schedule.arrivals().iter().map(|come| come.regions[0].to.rows.len());
                prop_assert_eq!(came.sum::<usize>(), come_to(operation, schedule.rank()));
                prop_assert!(schedule.moves().all(|moved| hosts.share(moved.from, moved.to)));
            }
        }
    }

    #[test]
    fn blocks_of_counts_lie_one_after_the_other(case in cases(), produced in any::<bool>()) {
        let world = case.hosts.len();
        let of_pair = |pair: usize| match pair % 3 {
            0 => 0,
            _ => case.rows[pair % world],
        };
        let rows: Vec<usize> = (0..world * world).map(of_pair).collect();
        let layout = Layout::new(&[vec![0; world - 1], vec![100_000]].concat(), K).unwrap();
        let counts = Counts::new(&rows, &layout).unwrap();
        let operation = if produced {
            Operation::PRODUCE_AND_ALL_TO_ALL
        } else {
            Operation::ALL_TO_ALL
        };
        let problem = Problem {
            hosts: Hosts::of(&case.hosts).unwrap(),
            counts: Some(counts.clone()),
            ..Problem::new(operation, DType::Bf16, layout, K)
        };
        let config = case.config.with_route(Route::Push);
        let schedules: Vec<_> = (0..world)
            .map(|rank| plan(&problem, rank, config).unwrap())
            .collect();
        let [come, moved] = by_ends(&schedules);
        let same = |moved: &Transfer, come: &Transfer| {
            Transfer {
                produced: None,
                ..moved.clone()
            } == *come
        };
        let mut ends = come.iter().map(|(key, come)| (moved.get(key), come));
        prop_assert_eq!(come.len(), moved.len());
        prop_assert!(ends.all(|(moved, come)| moved.is_some_and(|moved| same(moved, come))));
        // Of blocks that a caller makes, only the sender's transfer says which it waits for.
        prop_assert!(produced || stuck(&schedules) == 0);
        prop_assert!(has_turns(&schedules));
        for schedule in &schedules {
            let rank = schedule.rank();
            let came = schedule.arrivals().iter().map(|come| (come.from, &come.regions[0].to));
            let stays = schedule.requests().iter().filter(|made| made.owner == rank);
            let stays = stays.map(|made| (rank, &made.place));
            let received = in_order(came.chain(stays));
            prop_assert_eq!(received.len(), counts.received(rank));
            for from in 0..world {
                let of = received.iter().filter(|&&by| by == from).count();
                prop_assert_eq!(of, counts.between(from, rank));
            }
            prop_assert!(received.is_sorted());
            let sent = schedule.departures().iter().map(|sent| (sent.to, &sent.regions[0].from));
            let sent = in_order(sent);
            let own = if produced { counts.between(rank, rank) } else { 0 };
            prop_assert_eq!(sent.len(), counts.sent(rank) - own);
            prop_assert!(sent.is_sorted());
        }
    }
}

/// By row from the first on, the rank of the region that has it. Each row has one.
fn in_order<'r>(regions: impl Iterator<Item = (usize, &'r Region)>) -> Vec<usize> {
    let mut all: Vec<_> = regions.collect();
    all.sort_by_key(|(_, region)| region.rows.start);
    let mut ranks = Vec::new();
    for (rank, region) in all {
        assert_eq!(region.rows.start, ranks.len());
        ranks.resize(region.rows.end, rank);
    }
    ranks
}

/// What ranks add up, in words: "(0+1+(2+3))".
struct Sums<'s> {
    schedule: &'s Schedule,
    /// By matrix: the rows.
    rows: HashMap<usize, Vec<Option<String>>>,
    come: HashSet<usize>,
    /// Tiles that are made, and by block those that are left.
    made: usize,
    left: Vec<usize>,
}

impl<'s> Sums<'s> {
    /// The first `made` partials are made already.
    fn new(schedule: &'s Schedule, made: usize) -> Sums<'s> {
        let own = Some(schedule.rank().to_string());
        let rows = |matrix: usize, value: &Option<String>| {
            (
                matrix,
                vec![value.clone(); schedule.matrices()[matrix].rows],
            )
        };
        let mut rows = HashMap::from([rows(A, &own), rows(PARTIALS, &None), rows(OUT, &None)]);
        rows.get_mut(&PARTIALS).unwrap()[..made].fill(own.clone());
        let blocks = schedule.product().map_or(0, |product| product.blocks.len());
        let mut left = vec![0; blocks];
        left.extend(schedule.requests().iter().map(|_| 1));
        for tile in schedule.tiles() {
            left[tile.block as usize] += 1;
        }
        Sums {
            schedule,
            rows,
            come: HashSet::new(),
            made: 0,
            left,
        }
    }

    /// Makes a row of a sum. A row that has not come yet is none.
    fn add(&mut self, sum: &Sum, row: usize) {
        let own = self.schedule.rank().to_string();
        let added = sum.addends.iter().map(|addend| match *addend {
            Addend::Product => own.clone(),
            Addend::Rows { matrix, first } => self.rows[&matrix][first + row].clone().unwrap(),
        });
        let made = match sum.addends.is_empty() {
            true => own.clone(),
            false => format!("({})", added.collect::<Vec<_>>().join("+")),
        };
        let out = self.rows.get_mut(&sum.out).unwrap();
        out[sum.first + row] = Some(made);
    }

    /// Makes the next tile, if all that it waits for has come.
    fn multiply(&mut self) -> bool {
        let Some(tile) = self.schedule.tiles().get(self.made) else {
            return false;
        };
        if !tile.flags().all(|flag| self.come.contains(&flag)) {
            return false;
        }
        let product = self.schedule.product().unwrap();
        let block = product.block(tile);
        for row in product.rows(tile) {
            self.add(&block.sum, row - block.rows.start);
        }
        self.made += 1;
        self.left[tile.block as usize] -= 1;
        true
    }

    /// Has the caller make its next block, if there is one.
    fn request(&mut self) -> bool {
        let next = self.left.iter().position(|&left| left > 0);
        let requests = self.schedule.requests();
        let Some((number, request)) = next.and_then(|next| Some((next, requests.get(next)?)))
        else {
            return false;
        };
        let own = Some(self.schedule.rank().to_string());
        let place = self.rows.get_mut(&request.place.matrix).unwrap();
        place[request.place.rows.clone()].fill(own);
        self.left[number] = 0;
        true
    }

    /// The rows of a transfer from this rank, if its block is made and the addends of its sum have come.
    fn sent(&mut self, transfer: &Transfer) -> Option<Vec<Option<String>>> {
        if transfer.produced.is_some_and(|block| self.left[block] > 0) {
            return None;
        }
        if let Some(HostSum { sum, flags }) =
            transfer.added.map(|sum| &self.schedule.host_sums()[sum])
        {
            if !flags.clone().all(|flag| self.come.contains(&flag)) {
                return None;
            }
            // It takes the place of an addend that has come.
            assert!(sum.sum.out == PARTIALS && !flags.is_empty());
            assert!(sum.sum.addends.contains(&Addend::Rows {
                matrix: sum.sum.out,
                first: sum.sum.first,
            }));
            (0..sum.rows).for_each(|row| self.add(&sum.sum, row));
        }
        let from = &transfer.regions[0].from;
        Some(self.rows[&from.matrix][from.rows.clone()].to_vec())
    }

    fn take(&mut self, transfer: &Transfer, rows: Vec<Option<String>>) {
        let to = &transfer.regions[0].to;
        let slot = &mut self.rows.get_mut(&to.matrix).unwrap()[to.rows.clone()];
        // What comes first may come late in another order, so nothing else has the place.
        assert!(slot.iter().all(Option::is_none), "{transfer:?}");
        slot.clone_from_slice(&rows);
        self.come.insert(transfer.flag);
    }

    /// Makes the sum that is made when all has come.
    fn finish(&mut self) {
        if let Some(Reduction { rows, sum, .. }) = self.schedule.reduction() {
            (0..*rows).for_each(|row| self.add(sum, row));
        }
    }
}

/// Plays all ranks' schedules of sums through. Each rank has one worker, and over the network a rank sends only what the
/// other rank receives next. The first `made` partials of each are made already.
fn play(schedules: &[Schedule], made: usize) -> Vec<Sums<'_>> {
    let schedules = schedules.iter();
    let ranks = schedules.clone().map(|schedule| Sums::new(schedule, made));
    let mut ranks: Vec<Sums> = ranks.collect();
    let mut moved: Vec<VecDeque<_>> = schedules.clone().map(|s| s.moves().collect()).collect();
    let mut sent: Vec<VecDeque<_>> = schedules.clone().map(|s| s.sent().collect()).collect();
    let mut received: Vec<VecDeque<_>> = schedules.map(|s| s.received().collect()).collect();
    loop {
        let mut any = false;
        for rank in 0..ranks.len() {
            while ranks[rank].multiply() {
                any = true;
            }
            any |= ranks[rank].request();
            let is_received = |next: &&Transfer| received[next.to].front() == Some(next);
            let over_network = sent[rank].front().copied().filter(is_received);
            let within_host = moved[rank].front().copied();
            for next in [within_host, over_network].into_iter().flatten() {
                let Some(rows) = ranks[next.from].sent(next) else {
                    continue;
                };
                ranks[next.to].take(next, rows);
                for lane in [&mut moved[rank], &mut sent[rank], &mut received[next.to]] {
                    if lane.front() == Some(&next) {
                        lane.pop_front();
                    }
                }
                any = true;
            }
        }
        if !any {
            let mut left = moved.iter().chain(&sent).chain(&received);
            assert!(left.all(VecDeque::is_empty), "transfers are stuck");
            ranks.iter_mut().for_each(Sums::finish);
            return ranks;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_rank_adds_its_host_s_partials_and_one_sum_of_each_other_host(
        case in cases(),
        (operation, route) in select(vec![
            (Operation::MATMUL_REDUCE_SCATTER, Route::Push),
            (Operation::MATMUL_REDUCE_SCATTER, Route::Pull),
            (Operation::REDUCE_SCATTER, Route::Push),
            (Operation::PRODUCE_AND_REDUCE_SCATTER, Route::Push),
        ]),
    ) {
        let hosts = Hosts::of(&case.hosts).unwrap();
        let columns = if operation == Operation::MATMUL_REDUCE_SCATTER { 8 } else { K };
        let layout = Layout::new(&case.rows, columns).unwrap();
        let problem = Problem {
            hosts: hosts.clone(),
            ..Problem::new(operation, DType::Bf16, layout.clone(), K)
        };
        let world = layout.world();
        let tile = TileShape::new(128, K, 64);
        let config = Config::new(tile, case.config.chunking, route);
        let is_made = route == Route::Pull;
        let schedules: Vec<_> = (0..world)
            .map(|rank| plan(&problem, rank, config).unwrap())
            .collect();
        let [come, moved] = by_ends(&schedules);
        prop_assert_eq!(come, moved);
        for schedule in &schedules {
            for moved in schedule.moves() {
                prop_assert!(hosts.share(moved.from, moved.to));
            }
            for sent in schedule.sent() {
                prop_assert!(hosts.rail(sent.from).any(|peer| peer == sent.to));
            }
        }
        // Each row crosses the network once a host.
        let crossed = schedules.iter().flat_map(|schedule| schedule.sent());
        let crossed: usize = crossed.map(|sent| sent.regions[0].from.rows.len()).sum();
        prop_assert_eq!(crossed, layout.m() * (hosts.count() - 1));
        prop_assert!(has_turns(&schedules));
        for (rank, sums) in play(&schedules, if is_made { layout.m() } else { 0 }).into_iter().enumerate() {
            prop_assert_eq!(sums.made, sums.schedule.tiles().len());
            let of_host = |host: usize| {
                let ranks = (0..world).filter(|&rank| hosts.host_of(rank) == host);
                let ranks: Vec<_> = ranks.map(|rank| rank.to_string()).collect();
                match (host == hosts.host_of(rank), &ranks[..]) {
                    // What a host of one rank has is added up already.
                    (false, [one]) if sums.schedule.product().is_none() => one.clone(),
                    (false, _) => format!("({})", ranks.join("+")),
                    (true, _) => ranks.join("+"),
                }
            };
            let all: Vec<_> = (0..hosts.count()).map(of_host).collect();
            let expected = Some(format!("({})", all.join("+")));
            let out = &sums.rows[&OUT];
            prop_assert!(out.iter().all(|sum| *sum == expected), "{:?} {:?}", out, expected);
        }
    }

    #[test]
    fn of_few_sums_for_all_each_rank_adds_the_partials_of_all(
        case in cases(),
        (operation, route) in select(vec![
            (Operation::MATMUL_ALL_REDUCE, Route::Push),
            (Operation::MATMUL_ALL_REDUCE, Route::Pull),
            (Operation::ALL_REDUCE, Route::Push),
        ]),
        // Ranks choose their own tiles.
        heights in prop::collection::vec(select(vec![16, 64, 128]), MAX_WORLD),
    ) {
        let hosts = Hosts::of(&case.hosts).unwrap();
        prop_assume!(hosts.count() > 1);
        let rows: Vec<usize> = case.rows.iter().map(|rows| rows % 8).collect();
        let layout = Layout::new(&rows, 8).unwrap();
        let (m, world) = (layout.m(), layout.world());
        let problem = Problem {
            hosts: hosts.clone(),
            ..Problem::new(operation, DType::Bf16, layout, 8)
        };
        let schedule = |rank: usize| {
            let height = if route == Route::Pull { heights[rank] } else { 128 };
            let tile = TileShape::new(height, 64, 64);
            plan(&problem, rank, Config::new(tile, case.config.chunking, route)).unwrap()
        };
        let schedules: Vec<_> = (0..world).map(schedule).collect();
        let [come, moved] = by_ends(&schedules);
        prop_assert_eq!(come, moved);
        prop_assert!(has_turns(&schedules));
        let all: Vec<_> = (0..world).map(|rank| rank.to_string()).collect();
        let expected = Some(format!("({})", all.join("+")));
        let made = if operation == Operation::ALL_REDUCE { 0 } else { m };
        for sums in play(&schedules, made) {
            let is_moved_alone = sums.schedule.product().is_none();
            prop_assert!(is_moved_alone && sums.schedule.host_sums().is_empty());
            let out = &sums.rows[&OUT];
            prop_assert!(out.len() == m && out.iter().all(|sum| *sum == expected), "{:?}", out);
        }
    }
}

#[test]
fn a_rank_sends_other_hosts_at_most_two_mebibytes_of_what_it_adds_up_for_all() {
    // Four hosts of four. 16 rows of 5461 columns go to 12 ranks.
    let hosts: Vec<usize> = (0..16).map(|rank| rank / 4).collect();
    for operation in [Operation::MATMUL_ALL_REDUCE, Operation::ALL_REDUCE] {
        for (n, added) in [(5456, 16), (5472, 1)] {
            let problem = Problem {
                hosts: Hosts::of(&hosts).unwrap(),
                ..Problem::new(operation, DType::Bf16, Layout::new(&[1; 16], n).unwrap(), n)
            };
            let config = Config::new(TileShape::new(64, 64, 64), Chunking::new(1), Route::Pull);
            let schedule = plan(&problem, 5, over_hosts(&problem, config)).unwrap();
            let rows = schedule.reduction().map(|reduction| reduction.rows);
            assert_eq!(rows, Some(added), "{operation} {n}");
        }
    }
}

/// A gather of so many rows of each rank, in one chunk within a host.
fn gather(hosts: &[usize], rows: usize) -> Case {
    Case {
        hosts: hosts.into(),
        rows: vec![rows; hosts.len()],
        stages: 1,
        order: RowOrder::ByRank,
        operation: Operation::ALL_GATHER,
        config: Config::new(TileShape::new(128, 64, 64), Chunking::new(1), Route::Pull),
    }
}

/// The source of each chunk that comes to `rank`, in the order in which it expects them.
fn sources(case: &Case, rank: usize) -> Vec<usize> {
    let arrivals = plan(&case.problem(), rank, case.config).unwrap();
    let arrivals = arrivals.arrivals().iter();
    arrivals.map(|arrival| arrival.source).collect()
}

#[test]
fn rows_of_the_own_host_come_first_and_then_those_of_the_next_hosts() {
    let case = gather(&[0, 0, 1, 1, 2, 2], 4);
    let sources = |rank| sources(&case, rank);
    assert_eq!(sources(0), [1, 2, 3, 4, 5]);
    assert_eq!(sources(3), [2, 5, 4, 1, 0]);
}

#[test]
fn chunks_of_the_ranks_of_another_host_alternate() {
    let case = gather(&[0, 0, 1, 1], 1024);
    let sources = |rank| sources(&case, rank);
    assert_eq!(sources(0), [1, 2, 3, 2, 3]);
    assert_eq!(sources(1), [0, 3, 2, 3, 2]);
}

#[test]
fn a_shard_crosses_the_network_in_chunks_of_two_mebibytes() {
    let case = gather(&[0, 1], 2048);
    let schedules = case.schedules();
    let bytes: Vec<usize> = schedules[0]
        .arrivals()
        .iter()
        .map(|arrival| arrival.regions[0].to.rows.len() * K * 2)
        .collect();
    assert_eq!(bytes, [2 << 20; 4]);
}

#[test]
fn hosts_have_as_many_places_as_one_another() {
    let refused = Hosts::of(&["a", "b", "a"]).map_err(|error| error.kind().clone());
    let Err(Kind::Unsupported { what }) = refused else {
        panic!("it is not refused");
    };
    assert!(
        what.contains("rank 0 has 2 and that of rank 1 has 1"),
        "{what}"
    );
    assert_eq!(Hosts::of(&["a", "a"]).unwrap(), Hosts::default());
}
