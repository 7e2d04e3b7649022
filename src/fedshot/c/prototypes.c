/* The loss of prototypical networks, and its derivative: Snell et al. 2017, eqs. (1) and (2).
 *
 * Of each episode `from` to `to`: n supports and then q queries, rows of `width` floats of `h`, and
 * their labels y. A prototype is the mean of its class's supports, the logit of a class minus the
 * squared distance to it, the loss the mean cross-entropy of the queries. `room` has way * (2 width +
 * 2) floats an episode. Labels are 0 to way - 1: of others a support belongs to no class, and a query
 * sets `wrong`.
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

/* What one query adds to the loss; `logits` become the loss's derivatives by them, q times. */
static double query_loss(float *restrict logits, size way, int64_t y, size *restrict hit) {
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

/* `loss` and `accuracy` have a number an episode, `dh` the derivatives of the loss by its rows. */
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
        for (size i = 0; i < q; i++) {
            const float *x = queries + i * width;
            float *dx = out + (n + i) * width;
            for (size c = 0; c < way; c++) logits[c] = -squares_between(x, means + c * width, width);
            if (labels[n + i] < 0 || labels[n + i] >= way) {
                *wrong = 1;
                break;
            }
            total += query_loss(logits, way, labels[n + i], &hit);
            right += hit;
            memset(dx, 0, sizeof(float) * (size_t)width);
            for (size c = 0; c < way; c++) {
                float pull = -2 * logits[c] / (float)q;
                const float *mean = means + c * width;
                float *restrict to_mean = by_mean + c * width;
                for (size k = 0; k < width; k++) {
                    float part = pull * (x[k] - mean[k]);
                    dx[k] += part;
                    to_mean[k] -= part;
                }
            }
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
