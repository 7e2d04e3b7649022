/* Sampling of episodes from numpy's generator, with the same results as numpy's `choice` without
 * replacement and `permutation`, for fewer than MOST_DRAWN elements.
 */

#define MOST_DRAWN 10000

/* The C interface of a numpy bit generator. */
typedef struct {
    void *state;
    uint64_t (*next_uint64)(void *);
    uint32_t (*next_uint32)(void *);
} bits;

/* A random integer from 0 to `top`, inclusive: Lemire 2019, algorithm 5. */
static inline uint32_t up_to(bits *from, uint32_t top) {
    if (top == 0) return 0;
    uint32_t n = top + 1;
    uint64_t wide = (uint64_t)from->next_uint32(from->state) * n;
    if ((uint32_t)wide < n) {
        uint32_t unfair = (UINT32_MAX - top) % n;
        while ((uint32_t)wide < unfair) wide = (uint64_t)from->next_uint32(from->state) * n;
    }
    return (uint32_t)(wide >> 32);
}

/* The same by rejection, as numpy's `permutation` does; its `choice` uses the other algorithm. */
static inline uint32_t up_to_by_mask(bits *from, uint32_t top) {
    uint32_t mask = top, found;
    for (int by = 1; by < 32; by *= 2) mask |= mask >> by;
    do found = from->next_uint32(from->state) & mask;
    while (found > top);
    return found;
}

/* Fisher-Yates shuffle, from the end. */
ALONE void shuffle(bits *from, size n, int64_t *x, uint32_t (*draw)(bits *, uint32_t)) {
    for (size i = n - 1; i > 0; i--) {
        size j = draw(from, (uint32_t)i);
        int64_t kept = x[i];
        x[i] = x[j];
        x[j] = kept;
    }
}

/* k distinct numbers below n in random order: Bentley and Floyd 1987, then a shuffle. `taken` must
 * be all 0, and is all 0 afterwards. */
static inline void choose(bits *from, size n, size k, int64_t *out, uint8_t *taken) {
    for (size i = 0; i < k; i++) {
        size last = n - k + i;
        size found = up_to(from, (uint32_t)last);
        if (taken[found]) found = last;
        taken[found] = 1;
        out[i] = found;
    }
    for (size i = 0; i < k; i++) taken[out[i]] = 0;
    shuffle(from, k, out, up_to);
}

/* Episodes of `way` of `classes` classes. Class c has `counts[c]` rows, beginning at
 * `rows[starts[c]]`; up to `most` of them are drawn: `shot` for the support, the others for the
 * queries, which are shuffled. `rising` sorts the classes of an episode.
 *
 * Each episode takes way * (most + 1) + 1 places of `out`: its classes, its support class by class,
 * the number of queries, and the queries. */
void fedshot_draw(void *generator, size episodes, size classes, size way, size shot, size most,
                  size rising, const int64_t *rows, const int64_t *starts, const int64_t *counts,
                  int64_t *out) {
    bits *from = generator;
    uint8_t taken[MOST_DRAWN] = {0};
    int64_t drawn[MOST_DRAWN];
    for (size e = 0; e < episodes; e++, out += way * (most + 1) + 1) {
        int64_t *support = out + way, *queries = support + way * shot, *query = queries + 1;
        choose(from, classes, way, out, taken);
        for (size i = 1; rising && i < way; i++) {
            int64_t one = out[i];
            size j = i;
            for (; j > 0 && out[j - 1] > one; j--) out[j] = out[j - 1];
            out[j] = one;
        }
        size n = 0;
        for (size i = 0; i < way; i++) {
            int64_t c = out[i];
            size k = counts[c] < most ? counts[c] : most;
            choose(from, counts[c], k, drawn, taken);
            const int64_t *held = rows + starts[c];
            for (size j = 0; j < shot; j++) *support++ = held[drawn[j]];
            for (size j = shot; j < k; j++) query[n++] = held[drawn[j]];
        }
        shuffle(from, n, query, up_to_by_mask);
        *queries = n;
    }
}
