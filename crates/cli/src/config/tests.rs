use super::*;

fn file(text: &str) -> Vec<Setting> {
    parse_file(Path::new("overnight.toml"), text).expect("valid TOML")
}

#[test]
fn no_setting_gives_the_defaults() {
    let loaded = Loaded::from_settings(Vec::new()).unwrap();
    assert_eq!(loaded.config, Config::default());
    assert_eq!(loaded.origin("worker.lease_ttl"), Origin::Default);
}
