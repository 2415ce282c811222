//! What ranks without a common address tell one another to meet.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};

use super::GATHERED_BYTES;
use crate::error::{Error, Kind, Result};
use crate::ranks::address::{self, Address};
use crate::ranks::meeting::{Key, Meeting, MeetingPlace};
use crate::ranks::{host, tcp};

/// What rank 0 listens with for leaders of other hosts, or why it can't.
type Listening = Option<io::Result<TcpListener>>;

/// What a rank sends in the gather of [`Builder::connect_with`](super::Builder::connect_with), as words with spaces between them.
#[derive(Default)]
pub struct JoinRecord {
    /// Rank 0's; a dash on other ranks. Empty if it could not be made.
    pub address: Address,
    /// The host's tag.
    pub host: String,
    /// Where leaders of other hosts find rank 0. It is 0 if rank 0 does not listen for them.
    port: u16,
    places: Vec<IpAddr>,
}

impl JoinRecord {
    /// What `rank` sends, and what it listens with if it is rank 0 and there may be `several` hosts.
    pub fn of(rank: usize, several: bool) -> Result<(JoinRecord, Listening)> {
        let host = format!("{:016x}", host::tag(&host::boot_id(rank)?));
        if rank != 0 {
            let address = Address::of("-");
            let its = JoinRecord {
                address,
                host,
                ..JoinRecord::default()
            };
            return Ok((its, None));
        }
        let address = address::draw().map_err(Error::system(rank, "draw a random address"))?;
        // Without a network there may still be a group on this host.
        let listener = several.then(|| tcp::listen(0));
        let listening = listener.iter().flatten();
        let port = listening.flat_map(TcpListener::local_addr).next();
        let its = JoinRecord {
            address,
            host,
            port: port.map_or(0, |address| address.port()),
            places: tcp::addresses().unwrap_or_default(),
        };
        Ok((its, listener))
    }

    /// As many addresses as there is room for.
    pub fn encode(&self) -> Vec<u8> {
        let mut text = format!("{} {} {}", self.address.reveal(), self.host, self.port);
        for place in &self.places {
            let more = format!("{text} {place}");
            if more.len() <= GATHERED_BYTES {
                text = more;
            }
        }
        text.into_bytes()
    }

    pub fn decode(bytes: &[u8]) -> JoinRecord {
        let text = String::from_utf8_lossy(bytes);
        let mut words = text.split_whitespace();
        let mut word = || words.next().unwrap_or_default();
        JoinRecord {
            address: Address::of(word()),
            host: word().into(),
            port: word().parse().unwrap_or_default(),
            places: words.filter_map(|word| word.parse().ok()).collect(),
        }
    }

    /// Where leaders meet, if these are rank 0's words. Rank 0 has the `listener`.
    ///
    /// # Errors
    /// On all ranks, if rank 0 can't listen.
    pub fn meeting(&self, listener: Listening) -> Result<Meeting> {
        const LISTEN: &str = "listen for the other hosts' ranks";
        let place = match listener {
            Some(listener) => MeetingPlace::Listening(listener.map_err(Error::system(0, LISTEN))?),
            None if self.port == 0 => {
                return Err(Kind::System {
                    action: LISTEN.into(),
                    reason: "see that rank's own error".into(),
                }
                .on(0));
            }
            None => {
                let places = self.places.iter();
                MeetingPlace::At(
                    places
                        .map(|&place| SocketAddr::new(place, self.port))
                        .collect(),
                )
            }
        };
        let key = Key::of(self.address.reveal(), "leaders");
        Ok(Meeting { key, place })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    #[test]
    fn all_ranks_are_told_if_rank_0_cannot_listen() {
        let told = JoinRecord::default();
        let full = || io::Error::from(rustix::io::Errno::MFILE);
        for listener in [None, Some(Err(full()))] {
            let error = told.meeting(listener).unwrap_err().to_string();
            let words = "rank 0: cannot listen for the other hosts' ranks";
            assert!(error.starts_with(words), "{error}");
        }
    }

    #[test]
    fn what_rank_0_tells_is_read_as_it_was_written_and_fits() {
        let (mut told, _) = JoinRecord::of(0, false).unwrap();
        told.port = 65535;
        told.places = vec![Ipv6Addr::from([0x2001; 8]).into(); 20];
        let bytes = told.encode();
        assert!(bytes.len() <= GATHERED_BYTES);
        let read = JoinRecord::decode(&bytes);
        assert_eq!((&read.address, &read.host), (&told.address, &told.host));
        assert_eq!(read.port, told.port);
        assert!(read.places.len() >= 3 && told.places.starts_with(&read.places));
        let (other, _) = JoinRecord::of(1, true).unwrap();
        assert_eq!(JoinRecord::decode(&other.encode()).host, told.host);
        assert!(JoinRecord::decode(&[b' '; GATHERED_BYTES]).address == Address::default());
        assert!(
            JoinRecord::decode(&[0xff; GATHERED_BYTES])
                .places
                .is_empty()
        );
    }
}
