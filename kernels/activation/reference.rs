//! The definitions of the activations.

/// silu(gate) * up for rows of gate, then up, `intermediate` of each.
pub fn silu_mul(gate_up: &[f32], intermediate: usize) -> Vec<f32> {
    act_mul(gate_up, intermediate, |gate| gate / (1.0 + (-gate).exp()))
}

/// gelu(gate) * up, by the tanh form.
pub fn gelu_tanh_mul(gate_up: &[f32], intermediate: usize) -> Vec<f32> {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    act_mul(gate_up, intermediate, |gate| 0.5 * gate * (1.0 + (root * (gate + 0.044715 * gate.powi(3))).tanh()))
}

fn act_mul(gate_up: &[f32], intermediate: usize, act: impl Fn(f64) -> f64) -> Vec<f32> {
    let mut out = Vec::with_capacity(gate_up.len() / 2);
    for row in gate_up.chunks(2 * intermediate) {
        let (gate, up) = row.split_at(intermediate);
        out.extend(gate.iter().zip(up).map(|(&gate, &up)| (act(f64::from(gate)) * f64::from(up)) as f32));
    }
    out
}
