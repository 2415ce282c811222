//! The tree by which control messages go: the ranks of a host send theirs to the host's leader, and leaders to rank 0.

use std::sync::Arc;

use super::wire::Connection;
use crate::schedule::Hosts;

/// A rank's control connections.
#[derive(Debug)]
pub struct Tree {
    /// The way to rank 0. Rank 0 has none.
    pub parent: Option<Branch>,
    /// As in [`Shape`].
    pub children: Vec<Branch>,
}

/// A control connection.
#[derive(Debug)]
pub struct Branch {
    /// The rank at the other end.
    pub rank: usize,
    /// The ranks whose messages come from there, in their order.
    pub ranks: Vec<usize>,
    pub connection: Arc<Connection>,
}

/// The ranks at the other ends of a rank's control connections.
pub struct Shape {
    pub parent: Option<usize>,
    /// First the other ranks of the host, if this rank leads it. On rank 0 then the leaders of the other hosts.
    pub children: Vec<usize>,
}

impl Shape {
    /// The shape at `rank`, of `world` ranks on `hosts`.
    pub fn of(hosts: &Hosts, world: usize, rank: usize) -> Shape {
        let leader = hosts.leader_of(rank);
        if rank != leader {
            return Shape {
                parent: Some(leader),
                children: Vec::new(),
            };
        }
        let own = hosts.ranks_of(hosts.host_of(rank), world);
        let mut children: Vec<usize> = own.filter(|&other| other != rank).collect();
        if rank == 0 {
            children.extend(hosts.leaders().into_iter().skip(1));
        }
        Shape {
            parent: (rank != 0).then_some(0),
            children,
        }
    }
}

impl Tree {
    /// The tree at `rank`. `connections` are those to all of its peers: the parent and the children of [`Shape`].
    pub fn new(
        hosts: &Hosts,
        world: usize,
        rank: usize,
        connections: &[(usize, Arc<Connection>)],
    ) -> Tree {
        let shape = Shape::of(hosts, world, rank);
        let ranks_of = |peer: usize| {
            if hosts.share(peer, rank) {
                vec![peer]
            } else {
                hosts.ranks_of(hosts.host_of(peer), world).collect()
            }
        };
        let branch = |peer| {
            let connection = connections.iter().find(|(to, _)| *to == peer);
            connection.map(|(_, connection)| Branch {
                rank: peer,
                ranks: ranks_of(peer),
                connection: connection.clone(),
            })
        };
        Tree {
            parent: shape.parent.and_then(branch),
            children: shape.children.into_iter().filter_map(branch).collect(),
        }
    }

    /// True if `rank`, at the other end of a connection, passes on messages of other ranks.
    pub fn passes_on(&self, rank: usize) -> bool {
        let is_parent = self
            .parent
            .as_ref()
            .is_some_and(|parent| parent.rank == rank);
        let mut children = self.children.iter();
        is_parent || children.any(|child| child.rank == rank && child.ranks.len() > 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_one_way_to_rank_0() {
        for names in ["a", "aaa", "aabb", "abba", "abcabc", "aabbcc", "abcd"] {
            let names: Vec<char> = names.chars().collect();
            let (hosts, world) = (Hosts::of(&names).unwrap(), names.len());
            let shapes: Vec<Shape> = (0..world)
                .map(|rank| Shape::of(&hosts, world, rank))
                .collect();
            let mut children: Vec<usize> = Vec::new();
            for (rank, shape) in shapes.iter().enumerate() {
                assert_eq!(shape.parent.is_none(), rank == 0);
                for &child in &shape.children {
                    assert_eq!(shapes[child].parent, Some(rank), "{names:?}");
                }
                children.extend(&shape.children);
            }
            children.sort_unstable();
            assert!(children.into_iter().eq(1..world), "{names:?}");
        }
    }
}
