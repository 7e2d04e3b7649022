/* Elementwise operations: a step of Adam, summing the updates of clients, finding their largest
 * value, and dropout masks. Threads share the range of indices `from` to `to`.
 */

typedef struct {
    float decay, rise, grow, step, eps;
} adam_rule;

/* One step of Adam for one parameter. */
ALONE void adam_one(float *w, float g, float *m, float *v, adam_rule by) {
    float d = g + by.decay * *w;
    *m += by.rise * (d - *m);
    *v += by.grow * (d * d - *v);
    *w -= by.step * (*m / (sqrtf(*v) + by.eps));
}

static void adam_part(const float *restrict w, const float *restrict g, const float *restrict m,
                      const float *restrict v, size n, adam_rule by, float *restrict w_new,
                      float *restrict m_new, float *restrict v_new) {
    for (size i = 0; i < n; i++) {
        float one = w[i], first = m[i], second = v[i];
        adam_one(&one, g[i], &first, &second, by);
        w_new[i] = one;
        m_new[i] = first;
        v_new[i] = second;
    }
}

static void adam_in_place(float *restrict w, const float *restrict g, float *restrict m,
                          float *restrict v, size n, adam_rule by) {
    for (size i = 0; i < n; i++) adam_one(w + i, g[i], m + i, v + i, by);
}

/* A step of Adam for several tensors: with g + decay w in place of g,
 * m' = m + rise (g - m), v' = v + grow (g g - v), w' = w - step m' / (sqrt(v') + eps).
 * Indices run on through all tensors; `ends` has the end of each. `at` has the addresses of w, g, m,
 * v, w', m' and v' of each tensor; the last three may be those of w, m and v. */
void fedshot_adam(float *const *restrict at, const size *restrict ends, size from, size to,
                  float decay, float rise, float grow, float step, float eps) {
    adam_rule by = {decay, rise, grow, step, eps};
    for (size begin = 0; from < to; begin = *ends++, at += 7) {
        size last = *ends < to ? *ends : to, skip = from - begin;
        if (last <= from) continue;
        float *w = at[0] + skip, *g = at[1] + skip, *m = at[2] + skip, *v = at[3] + skip;
        if (at[0] == at[4])
            adam_in_place(w, g, m, v, last - from, by);
        else
            adam_part(w, g, m, v, last - from, by, at[4] + skip, at[5] + skip, at[6] + skip);
        from = last;
    }
}

static void take_part(const float *restrict x, int64_t *restrict total, size n, double scale) {
    for (size i = 0; i < n; i++) total[i] += (int64_t)rint((double)x[i] * scale);
}

/* total += x * scale, rounded to the nearest integer, ties to even, for several tensors as above.
 * `at` has the addresses of x and total of each tensor. */
void fedshot_take(void *const *restrict at, const size *restrict ends, size from, size to,
                  double scale) {
    for (size begin = 0; from < to; begin = *ends++, at += 2) {
        size last = *ends < to ? *ends : to, skip = from - begin;
        if (last <= from) continue;
        take_part((const float *)at[0] + skip, (int64_t *)at[1] + skip, last - from, scale);
        from = last;
    }
}

/* The largest |x| of several tensors, as the bits of a float: as integers, they order finite numbers
 * before infinity and NaN. */
void fedshot_largest(const float *const *restrict at, const size *restrict sizes, size tensors,
                     uint32_t *restrict largest) {
    uint32_t most = 0;
    for (size t = 0; t < tensors; t++) {
        const float *x = at[t];
        for (size i = 0; i < sizes[t]; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            bits &= 0x7fffffffu;
            most = bits > most ? bits : most;
        }
    }
    *largest = most;
}

/* The finaliser of a 32-bit murmur hash. */
static inline uint32_t mix32(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x85ebca6bu;
    word = (word ^ (word >> 13)) * 0xc2b2ae35u;
    return word ^ (word >> 16);
}

/* `value` where the hash of the index, keyed by two words, is at least the threshold, else 0. */
void fedshot_kept(size from, size to, int32_t high, int32_t low, int32_t threshold, float value,
                  float *restrict mask) {
    for (size i = from; i < to; i++) {
        uint32_t bits = mix32((uint32_t)i * 0x9e3779b9u ^ (uint32_t)high);
        mask[i] = (int32_t)mix32(bits + (uint32_t)low) >= threshold ? value : 0.0f;
    }
}
