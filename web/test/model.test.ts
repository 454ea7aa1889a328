import { describe, expect, test } from 'vitest'

import { address, all, ApiError } from '../src/api/client'
import type { Incident, TrainingJob } from '../src/contract'
import { plain } from '../src/model/ansi'
import { changesOf, formOf, spares } from '../src/model/fleets'
import { ago, bytes, duration, headline, local, moment, percent, sentence, soon } from '../src/model/format'
import { presentWords, standingOf } from '../src/model/incident'
import { progressOf, sampled } from '../src/model/progress'
import { asCurl, asPython, asYaml, fromYaml, NotASpec, requestOf } from '../src/model/spec'
import { problems, withParity } from '../src/model/submit'
import { rankWords, stacksOf } from '../src/model/stacks'
import { isQueued } from '../src/model/standing'
import { buckets } from '../src/model/time'
import { ticks, timeline } from '../src/model/timeline'

const NOW = 1_800_000_000

describe('figures', () => {
  test.each([
    [0, '0.0 s'],
    [0.01, '< 0.1 s'],
    [0.44, '0.4 s'],
    [9.96, '10 s'],
    [59.4, '59 s'],
    [185, '3 min 05 s'],
    [7800, '2 h 10 min'],
    [356400, '4 d 3 h'],
    [-1, '0.0 s'],
  ])('%s s is %s', (seconds, text) => expect(duration(seconds)).toBe(text))
  test.each([
    [1, '100 %'],
    [0.93, '93 %'],
    [0.9999, '99.99 %'],
    [0.999999999, '> 99.9999 %'],
    [0.0001, '0.01 %'],
    [0, '0 %'],
    [1e-9, '< 0.0001 %'],
  ])('%s is %s', (ratio, text) => expect(percent(ratio)).toBe(text))
  test.each([
    [0, '0 B'],
    [1023, '1023 B'],
    [1536, '1.5 KiB'],
    [2 ** 31, '2.0 GiB'],
  ])('%s bytes are %s', (value, text) => expect(bytes(value)).toBe(text))
  test.each([
    [0.4, 'just now'],
    [59, '59 s ago'],
    [61, '1 min ago'],
    [200_000, '2 d ago'],
    [-90, 'in 1 min 30 s'],
  ])('%s s before is %s', (passed, text) => expect(ago(NOW - passed, NOW)).toBe(text))
  test.each([
    ['', ''],
    ['waits', 'Waits.'],
    ['error (1)\nTraceback:\n  File x\nRuntimeError: no', 'Error (1). RuntimeError: no.'],
  ])('of %j is told', (text, said) => expect(headline(text)).toBe(said))
  test.each([
    [12, 'in 12 s'],
    [119.6, 'in 2 min'],
    [955, 'in 16 min'],
    [3600, 'in 1 h'],
  ])('%s s ahead is %s', (ahead, text) => expect(soon(NOW + ahead, NOW)).toBe(text))
  test('a moment has the reader’s time beside UTC, if it differs', () => {
    expect(moment(NOW, 'Europe/Berlin')).toBe('2027-01-15 08:00:00 UTC · 2027-01-15 09:00:00 CET')
    expect([local(NOW, 'UTC'), moment(NOW, 'UTC')]).toEqual(['', '2027-01-15 08:00:00 UTC'])
  })
  test.each([
    ['', ''],
    ['waits', 'Waits.'],
    ['Is it?', 'Is it?'],
  ])('%s as a sentence', (text, said) => expect(sentence(text)).toBe(said))
})

describe('where the time went', () => {
  test('the buckets add up to the wall time', () => {
    const found = buckets({ CreationTime: NOW - 100, AccountingSeconds: { train: 80, queue: 5, detect: 1 } }, NOW)
    expect(found.wallSeconds).toBe(100)
    expect(found.buckets.reduce((sum, bucket) => sum + bucket.seconds, 0)).toBe(100)
    expect(found.buckets.map((bucket) => bucket.name)).toEqual(['queue', 'train', 'detect', 'rest'])
  })
  test('of an ended job, up to its end', () => {
    expect(
      buckets({ CreationTime: NOW - 100, TrainingEndTime: NOW - 50, AccountingSeconds: { train: 50 } }, NOW),
    ).toMatchObject({ wallSeconds: 50, buckets: [{ name: 'train' }] })
  })
  test('a bucket of a newer server is kept', () => {
    expect(buckets({ AccountingSeconds: { hang: 3, train: 1 } }, NOW).buckets.map((bucket) => bucket.label)).toEqual([
      'Train',
      'hang',
    ])
  })
  test('more seconds than the clock knows make the bar longer, never a negative part', () => {
    expect(buckets({ CreationTime: NOW - 10, AccountingSeconds: { train: 12 } }, NOW)).toMatchObject({
      wallSeconds: 12,
      buckets: [{ seconds: 12 }],
    })
  })
})

const incident = (changes: Partial<Incident> = {}): Incident => ({
  IncidentId: 'inc-1',
  Headline: 'An instance was terminated',
  TrainingJobName: 'gpt',
  Project: 'default',
  RunId: 'run',
  Cause: 'instance_terminated',
  Phase: 'closed',
  Outcome: 'Recovered',
  Evidence: ['EC2 says so'],
  EvidenceFacts: [],
  Decision: 'replace i-a',
  Reason: '',
  GenerationBefore: 1,
  GenerationAfter: 2,
  RankSources: [],
  InstanceIds: ['i-a'],
  FaultedInstanceIds: ['i-a'],
  ReplacementInstanceIds: ['i-c'],
  FailedAt: NOW - 60,
  OpenedAt: NOW - 59,
  ClosedAt: NOW - 50,
  DetectSeconds: 1,
  ReplaceSeconds: 2,
  RestoreSeconds: 6,
  ReworkSeconds: 1,
  LostSteps: 2,
  FromStep: 10,
  RestoreSource: 'peer',
  ...changes,
})

describe('the timeline', () => {
  const job: Partial<TrainingJob> = {
    CreationTime: NOW - 100,
    TrainingStartTime: NOW - 90,
    NodeIds: ['i-b', 'i-c'],
    SecondaryStatusTransitions: [{ Status: 'Training', State: 'running', StartTime: NOW - 90, StatusMessage: 'x' }],
  }
  const spans = [
    { NodeId: 'i-a', StartTime: NOW - 90, EndTime: NOW - 59 },
    { NodeId: 'i-b', StartTime: NOW - 90 },
    { NodeId: 'i-c', StartTime: NOW - 59 },
    { NodeId: 'i-d', StartTime: NOW - 90, EndTime: NOW - 80 },
    { NodeId: 'i-d', StartTime: NOW - 70, EndTime: NOW - 60 },
  ]
  test('nodes with faults come first; a span ends at a failure or departure', () => {
    const { lanes } = timeline(job, [incident()], [], spans, NOW)
    expect(lanes.map((lane) => lane.id)).toEqual(['job', 'i-a', 'i-b', 'i-c', 'i-d'])
    expect(lanes[1]).toMatchObject({ spans: [{ from: NOW - 90, to: NOW - 60 }], faults: [{ at: NOW - 60 }] })
    expect(lanes[2]!.spans.map(({ from, to }) => [from, to])).toEqual([[NOW - 90, NOW]])
    expect(lanes[3]!.spans.map(({ from, to }) => [from, to])).toEqual([[NOW - 59, NOW]])
    expect(lanes[4]!.spans.map(({ from, to }) => [from, to])).toEqual([
      [NOW - 90, NOW - 80],
      [NOW - 70, NOW - 60],
    ])
  })
  test('a node that failed and stayed works on', () => {
    const { lanes } = timeline(job, [incident({ InstanceIds: [], FaultedInstanceIds: ['i-b'] })], [], spans, NOW)
    expect(lanes[1]).toMatchObject({ id: 'i-b', spans: [{ from: NOW - 90, to: NOW }], faults: [{ at: NOW - 60 }] })
  })
  test('a node that came during a recovery and failed in it is marked where it came', () => {
    const { lanes } = timeline(job, [incident({ FaultedInstanceIds: ['i-c', 'i-a', 'i-z'] })], [], spans, NOW)
    expect(lanes.slice(1, 4).map((lane) => [lane.id, lane.faults[0]!.at])).toEqual([
      ['i-c', NOW - 59],
      ['i-a', NOW - 60],
      ['i-z', NOW - 60],
    ])
  })
  test('the spans of the accounting are the lane of the job, and a span within an incident leads to it', () => {
    const times = [-100, -60, -59, -50]
    const done = (['train', 'unaccounted', 'restore', 'train'] as const).map((Bucket, index) => ({
      Bucket,
      StartTime: NOW + times[index]!,
      MissingNodeCount: 0,
      ...(index < 3 && { EndTime: NOW + times[index + 1]! }),
    }))
    const [lane] = timeline(job, [incident()], done, spans, NOW).lanes
    expect(lane!.spans.map((span) => [span.kind, span.word, span.from - NOW, span.to - NOW, span.incidentId])).toEqual([
      ['train', 'Train', -100, -60, undefined],
      ['unaccounted', 'Unaccounted', -60, -59, incident().IncidentId],
      ['restore', 'Restore', -59, -50, incident().IncidentId],
      ['train', 'Train', -50, 0, undefined],
    ])
  })
  test('without an open incident, the last span ends when the control plane last counted', () => {
    const restore = [{ Bucket: 'restore' as const, StartTime: NOW - 59, MissingNodeCount: 0 }]
    const last = (each: Incident) =>
      timeline({ ...job, AccountedUntil: NOW - 50 }, [each], restore, spans, NOW).lanes[0]!.spans[0]!
    expect(last(incident({ ClosedAt: NOW - 50 }))).toMatchObject({ to: NOW - 50, incidentId: incident().IncidentId })
    expect(last(incident({ ClosedAt: undefined }))).toMatchObject({ to: NOW, incidentId: incident().IncidentId })
  })
  test('a fault of no node in particular is on the lane of the job', () =>
    expect(
      timeline(job, [incident({ InstanceIds: [], FaultedInstanceIds: [] })], [], spans, NOW).lanes[0]!.faults,
    ).toHaveLength(1))
  test('a fault is on the lane of each node where it happened, with the evidence about that node', () => {
    const { lanes } = timeline(
      job,
      [
        incident({
          FaultedInstanceIds: ['i-b', 'i-c'],
          Evidence: ['rank 1 ended', 'i-b is mentioned'],
          EvidenceFacts: [
            { Kind: 'RankEnded', NodeIds: ['i-b'], Ranks: [1] },
            { Kind: 'Recorded', NodeIds: [], Ranks: [] },
          ],
        }),
      ],
      [],
      spans,
      NOW,
    )
    expect(lanes.slice(0, 3).map((lane) => [lane.id, ...lane.faults.map((fault) => fault.label)])).toEqual([
      ['job'],
      ['i-b', 'An instance was terminated. Rank 1 ended.'],
      ['i-c', 'An instance was terminated. Rank 1 ended. I-b is mentioned.'],
    ])
  })
  test('a job without data has its lane', () => expect(timeline({}, [], [], [], NOW).lanes).toHaveLength(1))
  test('lanes have a limit', () =>
    expect(
      timeline(
        {},
        [],
        [],
        Array.from({ length: 300 }, (_, index) => ({ NodeId: `i-${index}`, StartTime: NOW })),
        NOW,
        64,
      ),
    ).toMatchObject({ lanes: { length: 65 }, hiddenCount: 236 }))
  test.each([
    [10, 5],
    [3600, 8],
    [604_800, 7],
    [31_536_000, 5],
  ])('%s s have at most %s ticks and one more', (span, most) => {
    const found = ticks(NOW, NOW + span, most)
    expect(found.length).toBeGreaterThan(1)
    expect(found.length).toBeLessThanOrEqual(most + 1)
  })
})

describe('whether an incident is over', () => {
  test('an open one names its phase and how long the phase has taken', () => {
    const open = incident({ ClosedAt: undefined, Outcome: 'Open', Phase: 'restore' })
    expect(presentWords(open, NOW)).toBe('Everstep is restoring state, for 57 s so far.')
    expect(standingOf(open)).toEqual({ tone: 'busy', word: 'Recovering' })
  })
  test.each([
    ['Recovered', 'good', 'Recovered'],
    ['JobFailed', 'bad', 'Job failed'],
    ['JobPaused', 'idle', 'Job paused'],
    ['JobStopped', 'idle', 'Job stopped'],
  ] as const)('a closed one with the outcome %s', (Outcome, tone, word) => {
    expect(presentWords(incident({ Outcome }), NOW)).toBeUndefined()
    expect(standingOf(incident({ Outcome }))).toEqual({ tone, word })
  })
})

describe('stacks', () => {
  test('are what an event carries, and nothing else is', () => {
    const stack = { ranks: [0, 1], text: 'MainThread\n    step (train.py:3)' }
    expect(stacksOf({ Detail: { stacks: [stack, { ranks: 'all', text: '' }, null, { ranks: [1] }] } })).toEqual([stack])
    for (const Detail of [undefined, null, {}, { stacks: 'none' }]) expect(stacksOf({ Detail })).toEqual([])
  })
  test.each([
    [[3], 'rank 3'],
    [[2, 0, 1, 4], 'ranks 0–2, 4'],
  ])('%o are %s', (ranks, words) => expect(rankWords(ranks)).toBe(words))
})

describe('progress', () => {
  test('a rate needs some seconds', () => {
    const samples = [0, 2, 4, 6].reduce<{ at: number; boundary: number }[]>(
      (held, at) => sampled(held, { at, boundary: at * 3 }),
      [],
    )
    expect(progressOf(samples.slice(0, 2), 3)?.rate).toBeUndefined()
    expect(progressOf(samples, 3)).toEqual({ rate: 3, usualRate: 3 })
  })
  test('a step back begins anew, an answer twice changes nothing', () => {
    expect(sampled([{ at: 0, boundary: 9 }], { at: 1, boundary: 3 })).toEqual([{ at: 1, boundary: 3 }])
    expect(sampled([{ at: 1, boundary: 9 }], { at: 1, boundary: 9 })).toHaveLength(1)
  })
  test('steps that came while nobody looked came nobody knows when', () => {
    const before = [
      { at: 0, boundary: 99 },
      { at: 2, boundary: 100 },
    ]
    expect(sampled(before, { at: 1500, boundary: 200 })).toEqual([{ at: 1500, boundary: 200 }])
    expect(sampled(before, { at: 1500, boundary: 100 })).toHaveLength(3)
    expect(sampled(before, { at: 8, boundary: 101 })).toHaveLength(3)
  })
  test('nothing seen is nothing', () => expect(progressOf([], 1)).toBeUndefined())
})

describe('the words of a status', () => {
  test.each([
    ['Pending', undefined, true],
    ['Interrupted', 2, true],
    ['Interrupted', undefined, false],
    ['Paused', undefined, false],
    ['Training', undefined, false],
  ] as const)('%s at %s in the queue waits: %s', (SecondaryStatus, QueuePosition, waits) => {
    expect(isQueued({ SecondaryStatus, QueuePosition })).toBe(waits)
  })
})

describe('the figures of a fleet', () => {
  const counted = { SpareCount: 1, MinNodeCount: 2 }
  const governed = { ...counted, SparePolicy: { Probability: 0.99 } }
  test('are changed one by one', () => {
    expect(changesOf(counted, formOf(counted))).toEqual({})
    expect(changesOf(counted, { spares: 1, least: '3' })).toEqual({ MinNodeCount: 3 })
    expect(changesOf(counted, { spares: 0, least: 2 })).toEqual({ SpareCount: 0 })
    expect(changesOf(counted, { spares: '', least: 2 })).toEqual({})
  })
  test('leave a policy as it is, unless the form has a number of spares', () => {
    expect(changesOf(governed, { ...formOf(governed), least: 3 })).toEqual({ MinNodeCount: 3 })
    expect(changesOf(governed, { spares: 1, least: 2 })).toEqual({ SpareCount: 1 })
  })
  test('say what is wanted', () => expect([spares(counted), spares(governed)]).toEqual(['1', 'one is free with 99 %']))
})

test.each([
  ['\u001b[31mred\u001b[0m', 'red'],
  ['10%\r50%\r100%', '100%'],
  ['a\r', 'a'],
  ['\u001b]0;title\u0007x', 'x'],
  ['plain', 'plain'],
])('%j is read as %j', (raw, text) => expect(plain(raw)).toBe(text))

describe('a request in other words', () => {
  const job = {
    TrainingJobName: 'gpt',
    RunId: 'r1',
    FleetName: 'main',
    Source: { SourceId: 'a'.repeat(64) },
    EntryPoint: 'train.py',
    HyperParameters: { steps: "it's 2" },
    Environment: {},
    NodeCount: 4,
    RanksPerNode: 1,
    CheckpointConfig: { EverySteps: 25, S3Uri: 's3://b/jobs/gpt/run=r1/checkpoints/', ThirdSlot: false },
    OutputDataConfig: { S3OutputPath: 's3://mine/out/gpt/run=r1/' },
    Tags: {},
    Boundary: 7,
  } as unknown as TrainingJob
  test('what the service chose is left out, what the user chose is kept', () => {
    const request = requestOf(job)
    expect(request.CheckpointConfig).toEqual({ EverySteps: 25, ThirdSlot: false })
    expect(request.OutputDataConfig).toEqual({ S3OutputPath: 's3://mine/out/' })
    expect(request).not.toHaveProperty('Boundary')
    expect(request).not.toHaveProperty('Tags')
    const config = {
      CheckpointConfig: { ...job.CheckpointConfig, S3Uri: 's3://mine/jobs/gpt/' },
      OutputDataConfig: { S3OutputPath: 's3://b/jobs/gpt/run=r1/output/' },
    }
    const other = requestOf({ ...job, ...config })
    expect(other.CheckpointConfig?.S3Uri).toBe('s3://mine/jobs/')
    expect(other).not.toHaveProperty('OutputDataConfig')
  })
  test('YAML there and back', () => expect(fromYaml(asYaml(requestOf(job)))).toEqual(requestOf(job)))
  test('what is empty by the user’s own name stays, in every form', () => {
    const request = requestOf({
      ...job,
      Environment: { CUDA_VISIBLE_DEVICES: '' },
      HyperParameters: { suffix: '' },
      Tags: { team: '' },
      RoleArn: '',
      AlternativeFleetNames: ['other'],
    })
    const kept = {
      Environment: { CUDA_VISIBLE_DEVICES: '' },
      HyperParameters: { suffix: '' },
      Tags: { team: '' },
      AlternativeFleetNames: ['other'],
    }
    expect(request).toMatchObject(kept)
    expect(request).not.toHaveProperty('RoleArn')
    expect(fromYaml(asYaml(request))).toMatchObject(kept)
    expect(asPython(request)).toContain('"CUDA_VISIBLE_DEVICES": ""')
    expect(requestOf({ ...job, AlternativeFleetNames: [] })).not.toHaveProperty('AlternativeFleetNames')
  })
  test.each(['- a', 'just words', 'a: [', '3'])('%j is no request', (text) =>
    expect(() => fromYaml(text)).toThrow(NotASpec),
  )
  test('nothing is an empty request', () => expect(fromYaml('')).toEqual({}))
  test('a quote survives the shell', () => expect(asCurl(requestOf(job))).toContain(`it'\\''s 2`))
  test('Python has its own words', () => expect(asPython(requestOf(job))).toContain('"ThirdSlot": False'))
})

describe('what is wrong before it is sent', () => {
  const good = {
    TrainingJobName: 'gpt-1',
    Source: { SourceId: '0'.repeat(64) },
    EntryPoint: 'train.py',
    NodeCount: 4,
    Protection: { Copies: 2 },
  }
  test('nothing', () => expect(problems(good)).toEqual({}))
  test('parity keeps one copy', () => {
    const parity = withParity({ Copies: 2, MaxSlowdown: 0.1 }, 4)
    expect(parity).toEqual({ Copies: 1, ParityGroupSize: 4, MaxSlowdown: 0.1 })
    expect(withParity(parity, undefined)).toEqual({ MaxSlowdown: 0.1 })
  })
  test.each([
    [{ TrainingJobName: 'a--b' }, 'TrainingJobName'],
    [{ TrainingJobName: 'a'.repeat(64) }, 'TrainingJobName'],
    [{ Source: { SourceId: 'x' } }, 'Source'],
    [{ EntryPoint: '' }, 'EntryPoint'],
    [{ NodeCount: 0 }, 'NodeCount'],
    [{ NodeCount: 1.5 }, 'NodeCount'],
    [{ NodeCount: undefined }, 'NodeCount'],
    [{ RanksPerNode: 0 }, 'RanksPerNode'],
    [{ Protection: { Copies: 5 } }, 'Protection'],
    [{ Protection: { ParityGroupSize: 8 } }, 'Protection'],
    [{ CheckpointConfig: { EverySteps: -1 } }, 'CheckpointConfig'],
  ])('%o', (change, field) => expect(Object.keys(problems({ ...good, ...change }))).toEqual([field]))
})

describe('calls', () => {
  test('path, query and body come from the contract', () => {
    expect(address('DescribeTrainingJob', { TrainingJobName: 'a/b' })).toEqual({ url: '/v1/training-jobs/a%2Fb' })
    expect(address('ListEvents', { TrainingJobName: 'a', AfterEventId: 0, NextToken: undefined })).toEqual({
      url: '/v1/events?TrainingJobName=a&AfterEventId=0',
    })
    expect(address('UpdateFleet', { FleetName: 'main', SpareCount: 2 })).toEqual({
      url: '/v1/fleets/main',
      body: { SpareCount: 2 },
    })
    // All fields of this operation's body are optional, and the request still has a body.
    expect(address('StopTrainingJob', { TrainingJobName: 'a' })).toEqual({ url: '/v1/training-jobs/a/stop', body: {} })
  })
  test('pages are followed to the end, and to a limit', async () => {
    const page = (token?: string) =>
      Promise.resolve({ items: [Number(token ?? 0)], next: String(Number(token ?? 0) + 1) })
    expect(await all(page, 3)).toEqual([0, 1, 2])
    expect(await all((token) => Promise.resolve({ items: ['x'], next: token ? undefined : 'more' }))).toEqual([
      'x',
      'x',
    ])
  })
  test.each([
    [0, true],
    [429, true],
    [503, true],
    [404, false],
    [401, false],
  ])('status %s may pass: %s', (status, passing) => expect(new ApiError(status, 'x', 'y').isPassing).toBe(passing))
})
