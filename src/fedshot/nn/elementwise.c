/* What goes over every number once: a step of Adam, looking at a client's update, taking it in, and
 * the masks of dropout.
 *
 * Numbers `from` to `to`, so that threads can share them; no number depends on another.
 */

/* With g + decay w for g: m' = m + rise (g - m), v' = v + grow (g g - v),
 * w' = w - step m' / (sqrt(v') + eps). */
void fedshot_adam(const float *restrict w, const float *restrict g, const float *restrict m,
                  const float *restrict v, size from, size to, float decay, float rise, float grow,
                  float step, float eps, float *restrict w_new, float *restrict m_new,
                  float *restrict v_new) {
    for (size i = from; i < to; i++) {
        float d = g[i] + decay * w[i];
        float first = m[i] + rise * (d - m[i]);
        float second = v[i] + grow * (d * d - v[i]);
        m_new[i] = first;
        v_new[i] = second;
        w_new[i] = w[i] - step * (first / (sqrtf(second) + eps));
    }
}

/* total += x * scale, rounded to whole numbers, halves to the even one. */
void fedshot_take(const float *restrict x, size from, size to, double scale,
                  int64_t *restrict total) {
    for (size i = from; i < to; i++) total[i] += (int64_t)rint((double)x[i] * scale);
}

/* The largest |x|, as the bits of a float: in their order numbers come first, then infinity, then
 * NaN. */
void fedshot_largest(const float *restrict x, size from, size to, uint32_t *restrict largest) {
    uint32_t most = 0;
    for (size i = from; i < to; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    *largest = most;
}

/* The finaliser of a 32-bit murmur hash. */
static inline uint32_t mix32(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x85ebca6bu;
    word = (word ^ (word >> 13)) * 0xc2b2ae35u;
    return word ^ (word >> 16);
}

/* `value` for the numbers whose hash, keyed by two words, reaches the threshold, 0 for the others. */
void fedshot_kept(size from, size to, int32_t high, int32_t low, int32_t threshold, float value,
                  float *restrict mask) {
    for (size i = from; i < to; i++) {
        uint32_t bits = mix32((uint32_t)i * 0x9e3779b9u ^ (uint32_t)high);
        mask[i] = (int32_t)mix32(bits + (uint32_t)low) >= threshold ? value : 0.0f;
    }
}
