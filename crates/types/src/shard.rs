//! A shard's states.

use crate::job::worded_enum;

worded_enum!(
    /// Where a shard stands.
    ShardState, "shard state", {
    /// Set by intake, release and lease expiry; a claim moves it on.
    Ready = "ready",
    /// Set by a claim; the commit of its last item, a release or expiry moves it on.
    Leased = "leased",
    /// Set by the commit of its last item; only a re-opening moves it back.
    Done = "done",
});

impl ShardState {
    /// Whether one guarded update may take a shard from this state to `next`.
    pub const fn can_become(self, next: ShardState) -> bool {
        use ShardState::*;
        matches!((self, next), (Ready, Leased) | (Leased, Ready | Leased | Done) | (Done, Ready))
    }
}
