/** After responses with only changes, the page holds the same data as after a full response. */
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest'

import { call } from '../src/api/client'
import { jobsQuery } from '../src/api/queries'
import type { GetMetricDataResponse, MetricDataResult, MetricSeries, TrainingJobSummary } from '../src/contract'
import { merged, mergedMetrics, START, type Logged } from '../src/model/changes'

/** A reproducible source of random numbers from 0 to below 1. */
function randomOf(seed: number): () => number {
  let state = seed
  return () => {
    state = (state * 1_664_525 + 1_013_904_223) % 2 ** 32
    return state / 2 ** 32
  }
}

const key = (item: { id: string }) => item.id
const changes = (IsIncremental: boolean, Removed: string[] = []) => ({ ChangeToken: 't', IsIncremental, Removed })

describe('a list', () => {
  const [a, b] = [{ id: 'a' }, { id: 'b' }]
  const held = merged(new Map(), changes(false), [a, b], key)
  test('that did not change keeps its identity', () => expect(merged(held, changes(true), [], key)).toBe(held))
  test('receives changed items and loses removed items', () => {
    const changed = { id: 'b' }
    const found = merged(held, changes(true, ['a']), [changed, { id: 'c' }], key)
    expect([...found.keys()]).toEqual(['b', 'c'])
    expect(found.get('b')).toBe(changed)
    expect([...held.keys()]).toEqual(['a', 'b'])
  })
  test('is replaced by a response that contains everything', () => {
    expect([...merged(held, changes(false), [b], key).keys()]).toEqual(['b'])
    expect([...merged(held, undefined, [b], key).keys()]).toEqual(['b'])
  })
})

function metric(name: string, steps: number[], value: (step: number) => number): MetricDataResult {
  const values = steps.map(value)
  return {
    MetricName: name,
    Steps: steps,
    LastSteps: steps,
    Times: steps,
    Counts: steps.map(() => 1),
    Minimums: values,
    Means: values,
    Maximums: values,
    LastValues: values,
    MinimumNodeIds: [],
    MaximumNodeIds: [],
  }
}

describe('series by node', () => {
  const answer = (steps: number[], Series: MetricSeries[], KeptPointCount?: number): GetMetricDataResponse => ({
    MetricDataResults: [{ ...metric('gpu', steps, (step) => step), Series, KeptPointCount }],
    Changes: changes(KeptPointCount !== undefined),
  })
  const values = (held: Logged) =>
    Object.fromEntries(held.get('gpu')!.Series!.map((each) => [each.NodeId, each.Values]))
  test('continue after the unchanged points, and are padded for nodes that come and go', () => {
    const first = mergedMetrics(
      new Map(),
      answer(
        [1, 2, 3],
        [
          { NodeId: 'i-a', Values: [1, 2, 3] },
          { NodeId: 'i-b', Values: [4, 'NaN', 6] },
        ],
      ),
    )
    const later = mergedMetrics(
      first,
      answer(
        [3, 4],
        [
          { NodeId: 'i-b', Values: [7, 8] },
          { NodeId: 'i-c', Values: [9, 9] },
        ],
        2,
      ),
    )
    expect(values(later)).toEqual({
      'i-a': [1, 2, 'NaN', 'NaN'],
      'i-b': [4, 'NaN', 7, 8],
      'i-c': ['NaN', 'NaN', 9, 9],
    })
    expect(later.get('gpu')!.Steps).toEqual([1, 2, 3, 4])
    expect(values(first)['i-a']).toEqual([1, 2, 3])
  })
})

test.each(Array.from({ length: 200 }, (_, seed) => seed))('metrics of a random history: seed %i', (seed) => {
  const random = randomOf(seed)
  const upTo = (limit: number) => Math.floor(random() * limit)
  let [served, before] = [new Map<string, MetricDataResult>(), new Map<string, MetricDataResult>()]
  let held: Logged = new Map()
  for (let round = 0; round < 30; round += 1) {
    for (const name of ['loss', 'eval/loss', 'lr']) {
      const now = served.get(name)?.Steps ?? []
      const kept = random() < 0.2 ? upTo(now.length + 1) : now.length // A recovery goes back to an earlier step.
      const length = kept + upTo(4)
      if (random() < 0.5) continue
      if (!length || random() < 0.05) served.delete(name)
      else {
        const old = served.get(name)
        const salt = random()
        const steps = Array.from({ length }, (_, step) => step)
        served.set(
          name,
          metric(name, steps, (step) => (step < kept ? (old!.Means[step] as number) : step + salt)),
        )
      }
    }
    const isIncremental = round > 0 && random() < 0.9
    held = mergedMetrics(held, response(isIncremental ? before : undefined, served, upTo))
    expect(held).toEqual(served)
    before = new Map(served)
  }
})

/** Return a response with a random KeptPointCount, up to the number of unchanged leading points of each metric. */
function response(before: Logged | undefined, now: Logged, upTo: (limit: number) => number): GetMetricDataResponse {
  const results = [...now].flatMap(([name, metric]): MetricDataResult[] => {
    const old = before?.get(name)
    if (!before || !old) return [metric]
    const differs = metric.Means.findIndex((value, index) => value !== old.Means[index])
    const equal = differs < 0 ? Math.min(metric.Means.length, old.Means.length) : differs
    if (equal === metric.Means.length && equal === old.Means.length) return []
    const kept = Math.max(0, equal - upTo(3))
    const columns = Object.entries(metric).map(([column, values]) => [
      column,
      Array.isArray(values) ? values.slice(kept) : values,
    ])
    return [{ ...(Object.fromEntries(columns) as MetricDataResult), KeptPointCount: kept }]
  })
  const removed = before ? [...before.keys()].filter((name) => !now.has(name)) : []
  return { MetricDataResults: results, Changes: changes(before !== undefined, removed) }
}

describe('requests', () => {
  let sent: { url: string; tag?: string }[] = []
  let answers: (() => Response)[] = []
  beforeEach(() => {
    sent = []
    vi.stubGlobal('fetch', (url: string, init: RequestInit) => {
      sent.push({ url, tag: (init.headers as Record<string, string>)['if-none-match'] })
      return Promise.resolve(answers.shift()!())
    })
  })
  afterEach(() => vi.unstubAllGlobals())
  const json =
    (body: unknown, headers: Record<string, string> = {}) =>
    () =>
      new Response(JSON.stringify(body), { headers })
  const unchanged = () => new Response(null, { status: 304, headers: { etag: '"1"' } })

  test('name the response that the client has, and use it again if it is the same', async () => {
    answers = [json({ Fleets: [1] }, { etag: '"1"' }), unchanged, json({ Fleets: [2] }, { etag: '"2"' })]
    const first = await call('ListFleets', {})
    expect(await call('ListFleets', {})).toBe(first)
    expect(await call('ListFleets', {})).toEqual({ Fleets: [2] })
    expect(sent.map((each) => each.tag)).toEqual([undefined, '"1"', '"1"'])
  })

  test('of the list of jobs receive only changes, in the order of the service', async () => {
    const job = (RunId: string, CreationTime: number, Boundary = 0) =>
      ({ RunId, CreationTime, Boundary }) as TrainingJobSummary
    const page = (
      jobs: TrainingJobSummary[],
      IsIncremental: boolean,
      Removed: string[],
      ChangeToken: string,
      NextToken?: string,
    ) => json({ TrainingJobSummaries: jobs, Changes: { ChangeToken, IsIncremental, Removed }, NextToken })
    const list = () => (jobsQuery.queryFn as (context: object) => Promise<TrainingJobSummary[]>)({ signal: undefined })
    answers = [page([job('c', 3), job('b', 2)], false, [], 't1', 'next'), page([job('a', 1)], false, [], 't2')]
    expect((await list()).map((each) => each.RunId)).toEqual(['c', 'b', 'a'])
    answers = [page([job('d', 4), job('c', 3, 9)], true, ['b'], 't3', 'next'), page([job('b', 2)], true, [], 't4')]
    const found = await list()
    expect(found.map((each) => [each.RunId, each.Boundary])).toEqual([
      ['d', 0],
      ['c', 9],
      ['b', 0],
      ['a', 0],
    ])
    const asked = sent.map((each) => new URLSearchParams(each.url.split('?')[1]).get('ChangesSince'))
    expect(asked).toEqual([START, START, 't1', 't2'])
  })
})
