//! Hosts on one machine: a network namespace each, with a cable to every network it is on.
//! A pulled cable drops packets and tells nobody, as a failed switch does: no reset, no error.
//!
//! Needs root and iproute2. Everything goes when it is dropped.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;

use crate::harness::missing;

/// Hosts and networks by number. This machine itself is on every network.
#[derive(Debug)]
pub(crate) struct Network {
    /// In every name, so that two runs do not meet.
    tag: String,
    hosts: Vec<&'static str>,
    nets: Vec<&'static str>,
}

impl Network {
    /// Errors say what could not be done, most often for want of rights.
    pub(crate) fn new(hosts: &[&'static str], nets: &[&'static str]) -> Result<Self, String> {
        let tag = format!("o{:x}", std::process::id() % 0x1_0000);
        let network = Self { tag, hosts: hosts.to_vec(), nets: nets.to_vec() };
        for (number, net) in nets.iter().enumerate() {
            let bridge = network.bridge(net);
            ip(&["link", "add", &bridge, "type", "bridge"])?;
            ip(&["addr", "add", &format!("{}/24", network.here(net)), "dev", &bridge])?;
            ip(&["link", "set", &bridge, "up"])?;
            debug_assert!(number < 10, "a name of a cable has one digit for its network");
        }
        for host in hosts {
            let namespace = network.namespace(host);
            ip(&["netns", "add", &namespace])?;
            ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
            for net in nets {
                let (cable, there) = (network.cable(host, net), format!("to-{net}"));
                ip(&["link", "add", &cable, "type", "veth", "peer", "name", &there, "netns", &namespace])?;
                ip(&["link", "set", &cable, "master", &network.bridge(net), "up"])?;
                let address = format!("{}/24", network.address(host, net));
                ip(&["-n", &namespace, "addr", "add", &address, "dev", &there])?;
                ip(&["-n", &namespace, "link", "set", &there, "up"])?;
            }
        }
        Ok(network)
    }

    /// Pulls a host's cable out of a network.
    pub(crate) fn cut(&self, host: &str, net: &str) {
        ip(&["link", "set", &self.cable(host, net), "nomaster"]).expect("a cable can be pulled");
    }

    /// Puts it back.
    pub(crate) fn heal(&self, host: &str, net: &str) {
        ip(&["link", "set", &self.cable(host, net), "master", &self.bridge(net)]).expect("a cable can be put back");
    }

    /// This machine's address on a network.
    pub(crate) fn here(&self, net: &str) -> IpAddr {
        self.on(net, 1)
    }

    /// A host's address on a network.
    pub(crate) fn address(&self, host: &str, net: &str) -> IpAddr {
        let number = self.hosts.iter().position(|known| *known == host).expect("a host of this network");
        self.on(net, 10 + number as u8)
    }

    /// Runs the words after it on a host; the process keeps its id.
    pub(crate) fn on_host(&self, host: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(host)]);
        command
    }

    /// From the block that is kept for tests between networks (RFC 2544).
    fn on(&self, net: &str, last: u8) -> IpAddr {
        let number = self.nets.iter().position(|known| *known == net).expect("a known network");
        let run = (std::process::id() % 80) as u8 * 3;
        IpAddr::V4(Ipv4Addr::new(198, 18, run + number as u8, last))
    }

    fn bridge(&self, net: &str) -> String {
        format!("{}-{net}", self.tag)
    }

    fn namespace(&self, host: &str) -> String {
        format!("{}-{host}", self.tag)
    }

    fn cable(&self, host: &str, net: &str) -> String {
        let number = self.nets.iter().position(|known| *known == net).expect("a known network");
        format!("{}-{host}{number}", self.tag)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Cables go with their namespace. What was never made cannot be removed.
        for host in &self.hosts {
            let _ = ip(&["netns", "del", &self.namespace(host)]);
        }
        for net in &self.nets {
            let _ = ip(&["link", "del", &self.bridge(net)]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|err| format!("ip: {err}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

#[test]
fn chaos_pulled_cable_drops_packets_and_tells_nobody() {
    let network = match Network::new(&["there"], &["one", "two"]) {
        Ok(network) => network,
        Err(why) => return missing("netns", &format!("network namespaces (root, iproute2): {why}")),
    };
    let listener = std::net::TcpListener::bind((network.here("one"), 0)).expect("an address of this machine");
    let address = listener.local_addr().expect("a bound socket has an address");
    let knock = "import socket, sys\ns = socket.socket()\ns.settimeout(0.4)\n\
        try: s.connect((sys.argv[1], int(sys.argv[2]))); print('through')\n\
        except TimeoutError: print('silence')\n\
        except OSError as e: print('told', e)";
    let ask = || {
        let mut command = network.on_host("there");
        command.args(["python3", "-c", knock]).arg(address.ip().to_string()).arg(address.port().to_string());
        let output = command.output().expect("ip is there");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    assert_eq!(ask(), "through");
    network.cut("there", "one");
    assert_eq!(ask(), "silence");
    network.heal("there", "one");
    assert_eq!(ask(), "through");
}
