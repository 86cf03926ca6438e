//! The definition of the norm.

/// Each row of x `[rows, weight.len()]` over its root mean square, times weight plus `weight_offset`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, weight_offset: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks(weight.len()) {
        let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        out.extend(row.iter().zip(weight).map(|(x, weight)| x * scale * (weight + weight_offset)));
    }
    out
}

/// residual += x, rounded by `round` to what the tensor holds; returns the norm of the sum.
pub fn add_rms_norm(
    residual: &mut [f32],
    x: &[f32],
    weight: &[f32],
    eps: f32,
    weight_offset: f32,
    round: impl Fn(f32) -> f32,
) -> Vec<f32> {
    residual.iter_mut().zip(x).for_each(|(residual, x)| *residual = round(*residual + x));
    rms_norm(residual, weight, eps, weight_offset)
}
