/* The loss of prototypical networks with its gradient, Snell et al. 2017, eqs. (1) and (2), and the
 * losses of few-round learning, which build on it. A prototype is the mean of the support of a class,
 * a logit is minus the squared distance to a prototype, and the loss is the mean cross-entropy.
 */

ALONE float squares_between(const float *restrict a, const float *restrict b, size width) {
    lanes sum = {0};
    size k = 0;
    for (; k + LANES <= width; k += LANES) {
        lanes apart = *(const lanes *)(a + k) - *(const lanes *)(b + k);
        sum += apart * apart;
    }
    float total = 0;
    for (size i = 0; i < LANES; i++) total += sum[i];
    for (; k < width; k++) total += (a[k] - b[k]) * (a[k] - b[k]);
    return total;
}

static void prototype_means(const float *restrict h, const int64_t *restrict y, size n, size width,
                            size way, float *restrict means, float *restrict counts) {
    memset(means, 0, sizeof(float) * (size_t)(way * width));
    memset(counts, 0, sizeof(float) * (size_t)way);
    for (size i = 0; i < n; i++) {
        if (y[i] < 0 || y[i] >= way) continue;
        float *mean = means + y[i] * width;
        counts[y[i]] += 1;
        for (size k = 0; k < width; k++) mean[k] += h[i * width + k];
    }
    for (size c = 0; c < way; c++) {
        if (counts[c] == 0) counts[c] = 1;
        for (size k = 0; k < width; k++) means[c * width + k] /= counts[c];
    }
}

/* The cross-entropy of a row of class y; `logits` are replaced by their gradients. */
static double cross_entropy(float *restrict logits, size way, int64_t y, size *restrict hit) {
    size best = 0;
    for (size c = 1; c < way; c++) best = logits[c] > logits[best] ? c : best;
    float most = logits[best], sum = 0;
    *hit = best == y;
    float own = logits[y] - most;
    for (size c = 0; c < way; c++) sum += logits[c] = expf(logits[c] - most);
    for (size c = 0; c < way; c++) logits[c] /= sum;
    logits[y] -= 1;
    return (double)logf(sum) - own;
}

typedef struct {
    const float *means;   /* way rows */
    const uint8_t *held;  /* which classes have a prototype; NULL for all */
    size way, width;
    float *logits;   /* memory for way numbers */
    float *by_mean;  /* gradients of the means are added here; NULL if not needed */
} prototypes;

ALONE int is_held(prototypes p, int64_t c) { return !p.held || p.held[c]; }

/* The loss of a row of class y; 0 if the class has no prototype. `dx` becomes `pull` times the
 * gradient of the row, for a mean over `rows` rows. */
ALONE double row_loss(const float *restrict x, int64_t y, prototypes p, float pull, float rows,
                      float *restrict dx, size *restrict hit) {
    for (size c = 0; c < p.way; c++)
        p.logits[c] = is_held(p, c) ? -squares_between(x, p.means + c * p.width, p.width) : -FLT_MAX;
    double loss = cross_entropy(p.logits, p.way, y, hit);
    memset(dx, 0, sizeof(float) * (size_t)p.width);
    if (!is_held(p, y)) return loss - loss; /* 0, or NaN if the loss is not finite */
    for (size c = 0; c < p.way; c++) {
        if (!is_held(p, c)) continue;
        float by = -2 * pull * p.logits[c] / rows;
        const float *mean = p.means + c * p.width;
        if (p.by_mean) {
            float *restrict to_mean = p.by_mean + c * p.width;
            for (size k = 0; k < p.width; k++) {
                float part = by * (x[k] - mean[k]);
                dx[k] += part;
                to_mean[k] -= part;
            }
        } else {
            for (size k = 0; k < p.width; k++) dx[k] += by * (x[k] - mean[k]);
        }
    }
    return loss;
}

/* The losses of the episodes `from` to `to`. `h` holds n support rows and then q query rows of
 * `width` floats per episode, y their labels, 0 to way - 1. A support row with another label belongs
 * to no class; a query with one sets `wrong`. `loss` and `accuracy` get one number per episode, `dh`
 * the gradients of the rows; `room` has way * (2 width + 2) floats per episode. */
void fedshot_prototypes(const float *restrict h, const int64_t *restrict y, size from, size to,
                        size n, size q, size width, size way, float *restrict room,
                        float *restrict loss, float *restrict accuracy, float *restrict dh,
                        int64_t *wrong) {
    for (size e = from; e < to; e++) {
        const float *rows = h + e * (n + q) * width, *queries = rows + n * width;
        const int64_t *labels = y + e * (n + q);
        float *means = room + e * way * (2 * width + 2), *by_mean = means + way * width;
        float *counts = by_mean + way * width, *logits = counts + way;
        float *out = dh + e * (n + q) * width;
        double total = 0;
        size right = 0, hit;
        prototype_means(rows, labels, n, width, way, means, counts);
        memset(by_mean, 0, sizeof(float) * (size_t)(way * width));
        prototypes all = {means, NULL, way, width, logits, by_mean};
        for (size i = 0; i < q; i++) {
            if (labels[n + i] < 0 || labels[n + i] >= way) {
                *wrong = 1;
                break;
            }
            total += row_loss(queries + i * width, labels[n + i], all, 1, (float)q,
                              out + (n + i) * width, &hit);
            right += hit;
        }
        for (size i = 0; i < n; i++) {
            float *ds = out + i * width;
            int64_t c = labels[i];
            int held = c >= 0 && c < way;
            for (size k = 0; k < width; k++) ds[k] = held ? by_mean[c * width + k] / counts[c] : 0;
        }
        loss[e] = (float)(total / (double)q);
        accuracy[e] = (float)right / (float)q;
    }
}

/* The mean loss of n groups of `each` rows, where row i has class y[i / each], over the rows whose
 * class has a prototype. `dx` becomes `pull` times its gradient, that of the means is added to
 * `p.by_mean`, and `right` becomes the number of correctly classified rows. */
static double rows_loss(const float *restrict x, const int64_t *restrict y, size n, size each,
                        prototypes p, float pull, float *restrict dx, size *restrict right) {
    size known = 0, hit;
    for (size i = 0; i < n; i++) known += is_held(p, y[i]) ? each : 0;
    known = known ? known : 1;
    double total = 0;
    *right = 0;
    for (size i = 0; i < n * each; i++) {
        total += row_loss(x + i * p.width, y[i / each], p, pull, (float)known, dx + i * p.width, &hit);
        *right += hit;
    }
    return total / (double)known;
}

/* The mean over the positions of n maps g [width, positions]; `apart`, if given, gets each position
 * as a row. */
static void pool(const float *restrict g, size n, size width, size positions, float *restrict f,
                 float *restrict apart) {
    for (size i = 0; i < n; i++)
        for (size k = 0; k < width; k++) {
            const float *at = g + (i * width + k) * positions;
            float sum = 0;
            for (size p = 0; p < positions; p++) {
                sum += at[p];
                if (apart) apart[(i * positions + p) * width + k] = at[p];
            }
            f[i * width + k] = sum / (float)positions;
        }
}

/* The gradient of the maps, from that of their means and, if given, of each position. */
static void unpool(const float *restrict df, const float *restrict dapart, size n, size width,
                   size positions, float *restrict dg) {
    for (size i = 0; i < n; i++)
        for (size k = 0; k < width; k++) {
            float *to = dg + (i * width + k) * positions;
            float of_mean = df[i * width + k] / (float)positions;
            for (size p = 0; p < positions; p++)
                to[p] = of_mean + (dapart ? dapart[(i * positions + p) * width + k] : 0);
        }
}

static int names_a_class(const int64_t *restrict y, size n, size way) {
    for (size i = 0; i < n; i++)
        if (y[i] < 0 || y[i] >= way) return 0;
    return 1;
}

/* The local loss of few-round learning, Park et al., eqs. (1) to (4), for n support maps
 * g [width, positions] with labels y, 0 to way - 1, and means f over positions: the loss of f with the
 * means of their classes as prototypes, plus gamma times the loss of every position (with `pooled`,
 * of f) with the prototypes `told`; `told` is NULL for none. `means` and `counts` become those of the
 * classes, `accuracy` that of the classification by `means`, `dg` the gradient of the loss. `room` has
 * (2 n (1 + positions) + way) width + 2 way floats. An invalid label only sets `wrong`. */
void fedshot_few_round(const float *restrict g, const int64_t *restrict y, const float *told,
                       const uint8_t *told_held, size n, size width, size positions, size way,
                       int32_t pooled, float gamma, float *restrict room, float *restrict loss,
                       float *restrict accuracy, float *restrict means, float *restrict counts,
                       float *restrict dg, int64_t *wrong) {
    if ((*wrong = !names_a_class(y, n, way))) return;
    int by_position = told && !pooled;
    size rows = n * width, right, unused;
    float *f = room, *df = f + rows, *apart = df + rows, *dapart = apart + rows * positions;
    float *by_mean = dapart + rows * positions, *logits = by_mean + way * width;
    uint8_t *held = (uint8_t *)(logits + way);
    pool(g, n, width, positions, f, by_position ? apart : NULL);
    memset(held, 0, (size_t)way);
    for (size i = 0; i < n; i++) held[y[i]] = 1;
    prototype_means(f, y, n, width, way, means, counts);
    for (size c = 0; c < way; c++) counts[c] = held[c] ? counts[c] : 0;
    memset(by_mean, 0, sizeof(float) * (size_t)(way * width));
    prototypes own = {means, held, way, width, logits, by_mean};
    double total = rows_loss(f, y, n, 1, own, 1, df, &right);
    for (size i = 0; i < n; i++)
        for (size k = 0; k < width; k++)
            df[i * width + k] += by_mean[y[i] * width + k] / counts[y[i]];
    if (told) {
        prototypes given = {told, told_held, way, width, logits, NULL};
        const float *x = pooled ? f : apart;
        total += gamma * rows_loss(x, y, n, pooled ? 1 : positions, given, gamma, dapart, &unused);
        for (size i = 0; pooled && i < rows; i++) df[i] += dapart[i];
    }
    unpool(df, by_position ? dapart : NULL, n, width, positions, dg);
    *loss = (float)total;
    *accuracy = (float)right / (float)n;
}

/* The loss of n queries with given prototypes, otherwise as above; `dmeans` becomes the gradient of
 * the prototypes. `room` has 2 n width + way floats. */
void fedshot_few_round_answers(const float *restrict g, const int64_t *restrict y,
                               const float *restrict means, const uint8_t *restrict held, size n,
                               size width, size positions, size way, float *restrict room,
                               float *restrict loss, float *restrict accuracy, float *restrict dg,
                               float *restrict dmeans, int64_t *wrong) {
    if ((*wrong = !names_a_class(y, n, way))) return;
    float *f = room, *df = f + n * width;
    size right;
    pool(g, n, width, positions, f, NULL);
    memset(dmeans, 0, sizeof(float) * (size_t)(way * width));
    prototypes given = {means, held, way, width, df + n * width, dmeans};
    *loss = (float)rows_loss(f, y, n, 1, given, 1, df, &right);
    *accuracy = (float)right / (float)n;
    unpool(df, NULL, n, width, positions, dg);
}
