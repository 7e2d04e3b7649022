/* The gates of a GRU, forward and backward, for one word of each of the texts `from` to `to`.
 *
 * Arrays hold the words of a text together, [words][width]; the next text is `words` rows further,
 * and `words` + 1 rows for the states, which begin with the state before the first word.
 */

/* exp(x) with a relative error of 2e-7: 2^k exp(f) with |f| <= log(2)/2, by its series. Without
 * branches, so that a compiler can vectorise it. x is clamped to +-87. */
static inline float gate_exp(float x) {
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float k = rintf(x * 1.44269504f);
    float f = x - k * 0.693359375f + k * 2.12194440e-4f;
    float y = 1.0f / 5040.0f;
    y = y * f + 1.0f / 720.0f;
    y = y * f + 1.0f / 120.0f;
    y = y * f + 1.0f / 24.0f;
    y = y * f + 1.0f / 6.0f;
    y = y * f + 0.5f;
    y = y * f + 1.0f;
    y = y * f + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)(k == k ? k : 0.0f) + 127) << 23; /* y is NaN where k is */
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return y * scale;
}

static inline float gate_sigmoid(float x) { return 1.0f / (1.0f + gate_exp(-x)); }

/* Near 0 the quotient would lose digits, so a series is used there. */
static inline float gate_tanh(float x) {
    float far = 1.0f - 2.0f / (gate_exp(2.0f * x) + 1.0f), s = x * x;
    float near = 62.0f / 2835.0f;
    near = near * s - 17.0f / 315.0f;
    near = near * s + 2.0f / 15.0f;
    near = near * s - 1.0f / 3.0f;
    near = x + x * s * near;
    return s < 0.04f ? near : far;
}

/* r = sigmoid(x_r + h_r), z = sigmoid(x_z + h_z), new = tanh(x_n + r h_n), next = new + z (h - new).
 *
 * `gates` holds x and is replaced by r | z | new; `kept` gets h_n. */
void fedshot_gru_gates(const float *restrict of_h, size from, size to, size words, size hidden,
                       float *restrict gates, float *restrict kept, float *restrict states) {
    for (size i = from; i < to; i++) {
        const float *s = of_h + 3 * i * hidden;
        float *g = gates + 3 * i * words * hidden, *keep = kept + i * words * hidden;
        float *now = states + i * (words + 1) * hidden, *next = now + hidden;
        for (size k = 0; k < hidden; k++) {
            float r = gate_sigmoid(g[k] + s[k]);
            float z = gate_sigmoid(g[hidden + k] + s[hidden + k]);
            float new = gate_tanh(g[2 * hidden + k] + r * s[2 * hidden + k]);
            g[k] = r;
            g[hidden + k] = z;
            g[2 * hidden + k] = new;
            keep[k] = s[2 * hidden + k];
            next[k] = new + z * (now[k] - new);
        }
    }
}

/* Gradients of one step. The gradient of `next` is `carry`, from later words, plus `grad`, in rows
 * with a stride of `stride`. by_x becomes that of x, whose parts r and z are also those of h_r and
 * h_z, by_n that of h_n, and `carry` that of h without the parts through h_r, h_z and h_n. */
void fedshot_gru_back(const float *restrict gates, const float *restrict kept,
                      const float *restrict states, const float *restrict grad, size stride,
                      size from, size to, size words, size hidden, float *restrict by_x,
                      float *restrict by_n, float *restrict carry) {
    for (size i = from; i < to; i++) {
        const float *g = gates + 3 * i * words * hidden, *s = kept + i * words * hidden;
        const float *now = states + i * (words + 1) * hidden, *own = grad + i * stride;
        float *dx = by_x + 3 * i * words * hidden, *dn = by_n + i * words * hidden;
        float *rest = carry + i * hidden;
        for (size k = 0; k < hidden; k++) {
            float r = g[k], z = g[hidden + k], new = g[2 * hidden + k];
            float d = rest[k] + own[k];
            float by_new = d * (1.0f - z) * (1.0f - new * new);
            dx[k] = by_new * s[k] * r * (1.0f - r);
            dx[hidden + k] = d * (now[k] - new) * z * (1.0f - z);
            dx[2 * hidden + k] = by_new;
            dn[k] = by_new * r;
            rest[k] = d * z;
        }
    }
}
