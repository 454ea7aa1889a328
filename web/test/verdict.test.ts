import { readFileSync } from 'node:fs'
import { join } from 'node:path'

import { describe, expect, test } from 'vitest'

import type {
  CapacityWait,
  DescribeProtectionResponse,
  Duty,
  Fleet,
  Incident,
  SecondaryStatusTransition,
  TrainingJob,
} from '../src/contract'
import { phaseLengths, phaseTexts, type Phase } from '../src/model/figures'
import { duration } from '../src/model/format'
import { hitAlike, openIncident, usualRate, verdict, type Facts, type Progress } from '../src/model/verdict'
import { SECTIONS } from '../src/words/duty'

const NOW = 1_800_000_000
const NOTHING: Duty = { Kind: 'Nothing', Urgency: 'None', Sentence: 'Nothing to do.', Actions: [] }
const duty = (Kind: Duty['Kind'], Urgency: Duty['Urgency'], Sentence = `${Urgency}: act.`): Duty => ({
  Kind,
  Urgency,
  Sentence,
  Actions: [],
})
const job = (changes: Partial<TrainingJob> = {}): Facts['job'] => ({
  TrainingJobName: 'gpt',
  Duty: NOTHING,
  RunId: 'run',
  FleetName: 'main',
  TrainingJobStatus: 'InProgress',
  SecondaryStatus: 'Training',
  Reason: 'trains from step 0',
  Generation: 1,
  NodeCount: 4,
  GenerationNodeCount: 4,
  AssignedNodeCount: 4,
  HealthyNodeCount: 4,
  Boundary: 1204,
  MaxBoundary: 1204,
  CommittedStep: 1203,
  CreationTime: NOW - 3600,
  TrainingStartTime: NOW - 3500,
  ...changes,
})
const interrupted = (State: SecondaryStatusTransition['State']) =>
  job({
    SecondaryStatus: 'Interrupted',
    Reason: 'place 1 in the queue',
    SecondaryStatusTransitions: [{ Status: 'Interrupted', State, StartTime: NOW - 30, StatusMessage: '' }],
  })
const shard = (inView = 2) => ({
  Rank: 0,
  OwnerNodeId: 'i-a',
  CommittedStep: 1203,
  Bytes: 1,
  Reason: '',
  Holders: ['i-a', 'i-b'].map((NodeId, index) => ({ NodeId, InView: index < inView })),
})
const protection = (changes: Partial<DescribeProtectionResponse> = {}): Partial<DescribeProtectionResponse> => ({
  CommittedStep: 1203,
  CommittedAt: NOW - 2,
  Copies: 2,
  ProtectionState: 'Protected',
  Reason: '',
  RecoveryOdds: [
    { LostNodes: 1, Probability: 1 },
    { LostNodes: 2, Probability: 0.93 },
  ],
  Shards: [shard(), shard()],
  LastCheckpoint: { Step: 1200, Generation: 1, CompletedAt: NOW - 10, Bytes: 1 },
  ...changes,
})
const progress = (changes: Partial<Progress> = {}): Progress => ({ rate: 2, usualRate: 2, ...changes })
const incident = (changes: Partial<Incident> = {}): Incident => ({
  IncidentId: 'inc-1',
  Headline: 'An instance was terminated',
  TrainingJobName: 'gpt',
  Project: 'default',
  RunId: 'run',
  Cause: 'instance_terminated',
  Phase: 'replace',
  Outcome: 'Open',
  Evidence: ['EC2 says so'],
  EvidenceFacts: [],
  Decision: 'replace i-a',
  Reason: 'lost',
  GenerationBefore: 1,
  RankSources: [],
  InstanceIds: ['i-a'],
  FaultedInstanceIds: ['i-a'],
  ReplacementInstanceIds: [],
  FailedAt: NOW - 12,
  OpenedAt: NOW - 10,
  DetectSeconds: 2,
  ...changes,
})
const closed = (seconds: number, id: string): Incident =>
  incident({
    IncidentId: id,
    Phase: 'closed',
    Outcome: 'Recovered',
    FailedAt: NOW - 1000,
    OpenedAt: NOW - 999,
    ClosedAt: NOW - 900,
    DetectSeconds: 1,
    ReplaceSeconds: seconds,
    RestoreSeconds: 3,
    ReworkSeconds: 1,
  })
const facts = (changes: Partial<Facts> = {}): Facts => ({
  job: job(),
  protection: protection(),
  incidents: [],
  fleet: { FleetName: 'main', FleetStatus: 'active', Reason: 'keeps 4 nodes', Drift: [] },
  progress: progress(),
  now: NOW,
  ...changes,
})
const all = (changes: Partial<Facts>) => verdict(facts(changes))

describe('the state of a job', () => {
  const running = (State: SecondaryStatusTransition['State'], seconds: number) => [
    { Status: 'Training' as const, State, StartTime: NOW - seconds, StatusMessage: '' },
  ]
  const cases: [string, Partial<Facts>, string, string, RegExp | ''][] = [
    ['training', {}, 'good', 'Training', /^Training at step 1,204\.$/],
    [
      'on fewer nodes',
      { job: job({ GenerationNodeCount: 3 }) },
      'warn',
      'Training',
      /^Training at step 1,204 on 3 of 4 nodes\. The job grows again when capacity returns\.$/,
    ],
    [
      'slower',
      { progress: progress({ rate: 1 }) },
      'good',
      'Training',
      /^Training at step 1,204, at 50 % of the usual rate\.$/,
    ],
    [
      'faster',
      { progress: progress({ rate: 4 }) },
      'good',
      'Training',
      /^Training at step 1,204, at 2\.0 times the usual rate\.$/,
    ],
    [
      'a clock of the server that is ahead',
      { protection: protection({ CommittedAt: NOW + 3 }) },
      'good',
      'Training',
      /^Training at step 1,204\.$/,
    ],
    [
      'a job that the server calls stalled',
      { job: job({ Duty: { ...duty('Stalled', 'Now'), Since: NOW - 61 } }) },
      'warn',
      'Stalled',
      /^Stalled at step 1,204: the last step was 1 min ago\. Trains from step 0\.$/,
    ],
    [
      'nothing observed yet',
      { progress: undefined, protection: undefined },
      'good',
      'Training',
      /^Training at step 1,204\.$/,
    ],
    [
      'recomputing',
      {
        job: job({ Boundary: 1190, CommittedStep: 1188 }),
        protection: undefined,
        incidents: [incident({ Phase: 'rework' })],
      },
      'busy',
      'Recomputing steps',
      /^Recomputing steps: at step 1,190 of 1,204\.$/,
    ],
    [
      'recovering',
      { job: job({ SecondaryStatus: 'Restarting', Reason: 'waits for i-b to prepare' }), incidents: [incident()] },
      'busy',
      'Recovering',
      /^Recovering: replacing nodes for 10 s\. Waits for i-b to prepare\.$/,
    ],
    [
      'recovering, with an earlier incident of the same cause',
      { job: job({ SecondaryStatus: 'Restarting', Reason: '' }), incidents: [closed(7, 'a'), incident()] },
      'busy',
      'Recovering',
      /^Recovering: replacing nodes for 10 s, usually 7\.0 s\.$/,
    ],
    [
      'recovering for too long',
      {
        job: job({ SecondaryStatus: 'Restarting', Reason: '', Duty: duty('RecoveryLate', 'Now') }),
        incidents: [incident({ FailedAt: NOW - 400, OpenedAt: NOW - 398 })],
      },
      'warn',
      'Recovering',
      /^Recovering: replacing nodes for 6 min 38 s\.$/,
    ],
    [
      'restarting before the incident is known',
      { job: job({ SecondaryStatus: 'Restarting', Reason: 'i-a is lost' }) },
      'busy',
      'Recovering',
      /^Recovering\. I-a is lost\.$/,
    ],
    [
      'before the first step',
      { job: job({ Boundary: 0, MaxBoundary: 0, BaseStep: 0, SecondaryStatusTransitions: running('running', 30) }) },
      'busy',
      'Starting',
      /^Starting: the ranks have run for 30 s, before the first step\.$/,
    ],
    [
      'ranks that start',
      {
        job: job({
          SecondaryStatus: 'Starting',
          Boundary: 0,
          MaxBoundary: 0,
          BaseStep: 0,
          SecondaryStatusTransitions: running('running', 30),
        }),
      },
      'busy',
      'Starting',
      /^Starting: the ranks have run for 30 s, before the first step\.$/,
    ],
    [
      'a first step that takes too long',
      {
        job: job({
          Boundary: 0,
          MaxBoundary: 0,
          BaseStep: 0,
          SecondaryStatusTransitions: running('running', 700),
          Duty: duty('FirstStepLate', 'Now'),
        }),
      },
      'warn',
      'Stalled',
      /^Stalled: the ranks have run for 11 min 40 s without a step\.$/,
    ],
    [
      'before the first step after a failure',
      { job: job({ Boundary: 1200, BaseStep: 1200 }), incidents: [incident({ Phase: 'restore' })] },
      'busy',
      'Recovering',
      /^Recovering: the ranks have run for an unknown time, before the first new step\. Training had reached step 1,204\.$/,
    ],
    [
      'paused',
      { job: job({ SecondaryStatus: 'Paused', Reason: 'a user paused the job' }) },
      'idle',
      'Paused',
      /^Paused at step 1,204\. A user paused the job\.$/,
    ],
    [
      'pausing',
      { job: job({ SecondaryStatus: 'Pausing', Reason: 'a user paused it' }) },
      'busy',
      'Pausing',
      /^Pausing at step 1,204\. A user paused it\.$/,
    ],
    [
      'pausing during a recovery',
      { job: job({ SecondaryStatus: 'Pausing', Reason: '' }), incidents: [incident()] },
      'busy',
      'Recovering',
      /^Recovering: replacing nodes/,
    ],
    [
      'interrupted, in the queue',
      { job: interrupted('queued') },
      'warn',
      'Interrupted',
      /^Interrupted at step 1,204\. Place 1 in the queue\.$/,
    ],
    [
      'interrupted, collecting nodes',
      { job: interrupted('allocating') },
      'warn',
      'Interrupted',
      /^Interrupted at step 1,204\./,
    ],
    [
      'interrupted, returning nodes',
      { job: interrupted('pausing') },
      'warn',
      'Returning nodes',
      /^Returning nodes at step 1,204\./,
    ],
    [
      'queued',
      { job: job({ SecondaryStatus: 'Pending', Reason: 'needs 4 nodes; jobs use 8 of at most 8 nodes' }) },
      'idle',
      'Queued',
      /^Queued\. Needs 4 nodes; jobs use 8 of at most 8 nodes\.$/,
    ],
    [
      'the first launch',
      { job: job({ SecondaryStatus: 'Starting', Boundary: -1, Reason: 'starts the ranks' }) },
      'busy',
      'Starting',
      /^Starting\. Starts the ranks\.$/,
    ],
    [
      'stopping',
      { job: job({ TrainingJobStatus: 'Stopping', SecondaryStatus: 'Stopping', Reason: 'a user requested it' }) },
      'busy',
      'Stopping',
      /^Stopping at step 1,204\. A user requested it\.$/,
    ],
    [
      'completed',
      { job: job({ TrainingJobStatus: 'Completed', SecondaryStatus: 'Completed', Reason: 'every rank ended' }) },
      'good',
      'Completed',
      /^Completed after 1,204 steps\.$/,
    ],
    [
      'failed',
      { job: job({ TrainingJobStatus: 'Failed', FailureReason: 'rank 2 exits with 1', Reason: 'other' }) },
      'bad',
      'Failed',
      /^Failed at step 1,204\. Rank 2 exits with 1\.$/,
    ],
    [
      'failed with a traceback',
      {
        job: job({
          TrainingJobStatus: 'Failed',
          MaxBoundary: 0,
          Boundary: 0,
          FailureReason: 'error (1)\nTraceback\n  File\nRuntimeError: no',
        }),
      },
      'bad',
      'Failed',
      /^Failed\. Error \(1\)\. RuntimeError: no\.$/,
    ],
    [
      'stopped before the first step',
      { job: job({ TrainingJobStatus: 'Stopped', Reason: 'a user requested it', Boundary: -1, MaxBoundary: -1 }) },
      'idle',
      'Stopped',
      /^Stopped\. A user requested it\.$/,
    ],
    [
      'an answer without a status',
      { job: { TrainingJobName: 'gpt', Duty: NOTHING } },
      'idle',
      'Unknown',
      /^The control plane has not reported a status/,
    ],
    ['an old answer', { isStale: true }, 'idle', 'Training', /^Training at step 1,204\.$/],
    [
      'a failure that waits for the person who took the job over',
      { job: job({ SecondaryStatus: 'Restarting', Duty: duty('TakenOver', 'Now') }), incidents: [incident()] },
      'bad',
      'Not recovering',
      /^Not recovering: a person has taken over the job\. Training had reached step 1,204\.$/,
    ],
  ]
  test.each(cases)('%s', (_, changes, tone, title, text) => {
    const { state } = all(changes)
    expect([state.title, state.tone]).toEqual([title, tone])
    expect(`${state.text} ${state.detail}`.trim()).toMatch(text)
  })
})

describe('the protection of a job', () => {
  const cases: [string, Partial<Facts>, string, string, string][] = [
    ['protected', {}, 'good', 'Protected', 'Any one node can fail without the loss of a step.'],
    [
      'degraded',
      {
        protection: protection({
          ProtectionState: 'Degraded',
          Reason: 'Rank 3 has 1 copy',
          Shards: [shard(), shard(1)],
        }),
      },
      'warn',
      'Degraded',
      'Degraded. Rank 3 has 1 copy.',
    ],
    [
      'degraded without a reason',
      { protection: protection({ ProtectionState: 'Degraded' }) },
      'warn',
      'Degraded',
      'Degraded. Some shards have too few copies.',
    ],
    [
      'one copy',
      { protection: protection({ RecoveryOdds: [{ LostNodes: 1, Probability: 0 }], Shards: [shard(1)] }) },
      'warn',
      'Protected',
      'The loss of one node loses the steps since the newest checkpoint in S3.',
    ],
    [
      'parity',
      { protection: protection({ Copies: 1, ParityGroupSize: 4 }) },
      'good',
      'Protected',
      'Any one node can fail without the loss of a step.',
    ],
    ['no odds reported', { protection: protection({ RecoveryOdds: [] }) }, 'good', 'Protected', 'Protected.'],
    [
      'two losses survived',
      {
        protection: protection({
          RecoveryOdds: [
            { LostNodes: 1, Probability: 1 },
            { LostNodes: 2, Probability: 1 },
          ],
        }),
      },
      'good',
      'Protected',
      'Any 2 nodes can fail without the loss of a step.',
    ],
    [
      'no commit',
      {
        job: job({ CommittedStep: -1 }),
        protection: protection({
          CommittedStep: -1,
          RecoveryOdds: [],
          LastCheckpoint: undefined,
          ProtectionState: 'Unprotected',
        }),
      },
      'bad',
      'Unprotected',
      'Unprotected: memory holds no committed step. No checkpoint is in S3.',
    ],
    [
      'no commit, but a checkpoint',
      {
        job: job({ CommittedStep: -1 }),
        protection: protection({ CommittedStep: -1, RecoveryOdds: [], ProtectionState: 'Unprotected' }),
      },
      'bad',
      'Unprotected',
      'Unprotected: memory holds no committed step. The checkpoint of step 1,200 is in S3.',
    ],
    [
      'no commit at the first step',
      {
        job: job({ Boundary: 1, MaxBoundary: 1, CommittedStep: -1 }),
        protection: protection({ CommittedStep: -1, RecoveryOdds: [], ProtectionState: 'Unprotected' }),
      },
      'idle',
      'Not yet protected',
      'Not yet protected: memory holds no committed step.',
    ],
    [
      'paused',
      {
        job: job({ SecondaryStatus: 'Paused' }),
        protection: protection({ ProtectionState: 'Unprotected', Shards: [], RecoveryOdds: [] }),
      },
      'idle',
      'Released',
      'The checkpoint of step 1,200 is in S3.',
    ],
    [
      'interrupted without a checkpoint',
      { job: interrupted('queued'), protection: protection({ LastCheckpoint: undefined }) },
      'warn',
      'Released',
      'No checkpoint is in S3.',
    ],
    ['no answer yet', { protection: undefined }, 'idle', 'Unknown', 'Protection is unknown.'],
    ['an answer without its fields', { protection: {} }, 'idle', 'Unknown', 'Protection is unknown.'],
    [
      'completed',
      { job: job({ TrainingJobStatus: 'Completed' }) },
      'idle',
      'Released',
      'The checkpoint of step 1,200 is in S3.',
    ],
    [
      'failed after its checkpoint',
      { job: job({ TrainingJobStatus: 'Failed' }) },
      'warn',
      'Released',
      '4 steps after the checkpoint of step 1,200 are lost.',
    ],
    [
      'failed one step after its checkpoint',
      { job: job({ TrainingJobStatus: 'Failed', Boundary: 1201, MaxBoundary: 1201 }) },
      'warn',
      'Released',
      '1 step after the checkpoint of step 1,200 is lost.',
    ],
    [
      'failed without a checkpoint',
      { job: job({ TrainingJobStatus: 'Failed' }), protection: protection({ LastCheckpoint: undefined }) },
      'bad',
      'Released',
      '1,204 steps are lost: no checkpoint is in S3.',
    ],
    [
      'failed at its checkpoint',
      { job: job({ TrainingJobStatus: 'Failed', Boundary: 1200, MaxBoundary: 1200 }) },
      'idle',
      'Released',
      'No step was lost: step 1,200 is in S3.',
    ],
    [
      'failed before a step',
      { job: job({ TrainingJobStatus: 'Failed', Boundary: 0, MaxBoundary: 0 }) },
      'idle',
      'Released',
      'No step was lost: the job had made none.',
    ],
    [
      'a silent holder',
      { job: job({ HealthyNodeCount: 3 }) },
      'warn',
      'Unconfirmed',
      'Protection is unconfirmed: 3 of 4 nodes are healthy.',
    ],
    ['an old answer', { isStale: true }, 'idle', 'Protected', 'Any one node can fail without the loss of a step.'],
    [
      'a committed step without holders',
      {
        protection: protection({
          ProtectionState: 'Unprotected',
          Reason: 'Step 1203 was committed, but no rank has reported its holders.',
        }),
      },
      'bad',
      'Unprotected',
      'Unprotected. Step 1203 was committed, but no rank has reported its holders.',
    ],
  ]
  test.each(cases)('%s', (_, changes, tone, title, text) =>
    expect(all(changes).protection).toEqual({ tone, title, text }),
  )
})

describe('the verdict in one line', () => {
  const wait: CapacityWait = {
    MissingNodeCount: 1,
    InstanceType: 'c7i.2xlarge',
    AvailabilityZone: 'us-east-1a',
    Message: 'We currently do not have sufficient c7i.2xlarge capacity',
    IsOutOfCapacity: true,
    FailedAttemptCount: 2,
    NextAttemptTime: NOW + 120,
  }
  const cases: [string, Partial<Facts>, string, string][] = [
    [
      'training',
      {},
      'good',
      'Training at step 1,204. | Any one node can fail without the loss of a step. Nothing to do.',
    ],
    [
      'a shortage during a recovery',
      {
        job: job({ SecondaryStatus: 'Restarting', CapacityWait: wait, Duty: duty('CapacityWait', 'Later', 'Decide.') }),
        incidents: [incident()],
      },
      'busy',
      'Recovering: waiting for 1 c7i.2xlarge in us-east-1a. | AWS is out of capacity; next attempt in 2 min. Decide.',
    ],
    [
      'a recovery without protection',
      {
        job: job({ SecondaryStatus: 'Restarting', Reason: '' }),
        incidents: [incident()],
        protection: protection({ ProtectionState: 'Unprotected', Reason: 'no rank has reported its holders' }),
      },
      'busy',
      'Recovering: replacing nodes for 10 s. | Unprotected. No rank has reported its holders. Nothing to do.',
    ],
    [
      'an urgent duty',
      { job: job({ Duty: duty('FleetFrozen', 'Now', 'Act now: find out why the fleet is frozen.') }) },
      'bad',
      'Training at step 1,204. | Any one node can fail without the loss of a step. Act now: find out why the fleet is frozen.',
    ],
    [
      'queued',
      { job: job({ SecondaryStatus: 'Pending', Reason: 'place 2 of 2 in the queue' }) },
      'idle',
      'Queued. | Place 2 of 2 in the queue. Nothing to do.',
    ],
  ]
  test.each(cases)('%s', (_, changes, tone, text) => {
    const { line } = all(changes)
    expect([line.tone, `${line.lead} | ${line.text}`]).toEqual([tone, text])
  })
})

test('every section of the runbook that a duty links to exists', () => {
  const runbook = readFileSync(join(import.meta.dirname, '../../docs/runbook.md'), 'utf8')
  const headings = [...runbook.matchAll(/^### (.+)$/gm)].map(([, heading]) => heading!.toLowerCase())
  expect(Object.values(SECTIONS).filter((each) => !headings.includes(each.replaceAll('-', ' ')))).toEqual([])
})

describe('the phase of a recovery', () => {
  test('is absent without an open incident', () => {
    expect(all({}).recovery).toBeUndefined()
    expect(all({ incidents: [closed(5, 'a')] }).recovery).toBeUndefined()
  })
  test('has its length, and the usual length after the same cause', () => {
    const { recovery } = all({ incidents: [closed(5, 'a'), closed(9, 'b'), closed(7, 'c'), incident()] })
    expect(recovery).toMatchObject({ elapsedSeconds: 10, usualSeconds: 7 })
    expect(all({ incidents: [incident()] }).recovery).toMatchObject({ usualSeconds: undefined })
  })
})

describe('other jobs that the same fault has hit', () => {
  const other = (changes: Partial<Incident> = {}) =>
    incident({ RunId: 'other', TrainingJobName: 'other', FailedAt: NOW - 20, ...changes })
  const hit = (open: Incident | undefined, ...others: Incident[]) =>
    hitAlike(job(), open, [incident(), ...others], new Set(['other', 'third']))
  test('failed in the same way at the same time, over by now or not', () => {
    expect(
      hit(
        incident(),
        other(),
        other({ RunId: 'third', TrainingJobName: 'third', ClosedAt: NOW }),
        other({ IncidentId: 'again' }),
      ),
    ).toEqual(['other', 'third'])
  })
  test.each([
    ['this job has no open incident', undefined, other()],
    ['another cause', incident(), other({ Cause: 'rank_exit' })],
    ['long before', incident(), other({ FailedAt: NOW - 12 - 301 })],
    ['another fleet', incident(), other({ RunId: 'elsewhere' })],
    ['two drills', incident({ Cause: 'drill' }), other({ Cause: 'drill' })],
  ])('not: %s', (_, open, them) => expect(hit(open, them)).toEqual([]))
})

describe('banners', () => {
  const taken = { TakenOverTime: NOW, TakenOverBy: 'ada' }
  const frozen = { FleetName: 'main', Duty: duty('FleetFrozen', 'Now', 'Act now: see.') } satisfies Partial<Fleet>
  test('are absent without a fact beyond the job', () => expect(all({}).banners).toEqual([]))
  test('do not repeat the card about what to do', () => {
    expect(all({ job: job({ Duty: frozen.Duty }), fleet: frozen }).banners).toEqual([])
    expect(all({ job: job({ ...taken, Duty: duty('TakenOver', 'Optional') }) }).banners).toEqual([])
    expect(all({ job: job({ TrainingJobStatus: 'Completed' }), fleet: frozen }).banners).toEqual([])
  })
  test.each([
    [{ fleet: frozen }, 'Fleet main needs a person: Act now: see.'],
    [
      { job: job({ ...taken }) },
      'Automation is off for this job: ada has taken it over. Everstep makes no decision until the job is handed back.',
    ],
    [
      { job: job({ PurgeTime: 0 }) },
      /^The job is in the trash: Everstep deletes it and its objects in S3 after 1970-01-01 00:00:00 UTC/,
    ],
    [{ fleet: { FleetStatus: 'deleting' } }, 'The fleet is being deleted: Everstep ends its nodes one by one.'],
    [
      { othersHit: ['a', 'b'] },
      'More jobs failed: 2 other jobs of this fleet failed in the same way at the same time: a, b.',
    ],
    [{ othersHit: ['a'] }, /: 1 other job of this fleet failed/],
  ] as [Partial<Facts>, string | RegExp][])('%o', (changes, text) => {
    const banners = all(changes).banners.map((banner) => `${banner.title}: ${banner.text}`)
    expect(banners).toEqual([typeof text === 'string' ? text : expect.stringMatching(text)])
  })
})

describe('phases', () => {
  test('of a closed incident add up to the interruption', () => {
    const done = incident({
      Phase: 'closed',
      Outcome: 'Recovered',
      FailedAt: NOW - 20,
      OpenedAt: NOW - 18,
      ClosedAt: NOW - 4,
      DetectSeconds: 2,
      ReplaceSeconds: 5,
      RestoreSeconds: 6,
      ReworkSeconds: 3,
    })
    const lengths = phaseLengths(done, NOW)
    expect(lengths.map((each) => each.phase)).toEqual(['detect', 'replace', 'restore', 'rework'])
    expect(lengths.reduce((sum, each) => sum + each.seconds, 0)).toBe(16)
  })
  test.each([
    ['replace', 2],
    ['restore', 3],
    ['rework', 4],
  ] as const)('of an open one: %s is the last, and all add up to now', (phase, number) => {
    const lengths = phaseLengths(incident({ Phase: phase, ReplaceSeconds: 3, RestoreSeconds: 2 }), NOW)
    expect(lengths).toHaveLength(number)
    expect(lengths.at(-1)!.isOpen).toBe(true)
    expect(lengths.reduce((sum, each) => sum + each.seconds, 0)).toBe(12)
  })
})

test.each([
  [[0.07, 6.96], ['0.1 s', '6.9 s'], '7.0 s'],
  [[7.5, 12.4, 1.1], ['8 s', '12 s', '1 s'], '21 s'],
  [[0.5, 0.2, 16.4], ['1 s', '< 1 s', '16 s'], '17 s'],
  [[172.2, 1.1, 3.0], ['2 min 52 s', '1 s', '3 s'], '2 min 56 s'],
  [[20, 7180.5], ['< 1 min', '2 h 00 min'], '2 h 00 min'],
  [[20, 190_000], ['< 1 h', '2 d 5 h'], '2 d 5 h'],
  [[90_000, 90_000], ['25 h 00 min', '25 h 00 min'], '2 d 2 h'],
  [[0, 0], ['0.0 s', '0.0 s'], '0.0 s'],
])('phases of %j s have texts that add up to the text of their total', (seconds, texts, total) => {
  const phases = seconds.map((each) => ({ phase: 'detect' as Phase, seconds: each, isOpen: false }))
  expect(phaseTexts(phases)).toEqual(texts)
  expect(duration(seconds.reduce((sum, each) => sum + each))).toBe(total)
})

test('the newest open incident counts', () => {
  expect(openIncident([closed(1, 'a'), incident({ IncidentId: 'b' }), incident({ IncidentId: 'c' })])?.IncidentId).toBe(
    'c',
  )
  expect(openIncident(undefined)).toBeUndefined()
})

test('a usual rate needs steps and time', () => {
  expect(usualRate({ MaxBoundary: 100, AccountingSeconds: { train: 50 } })).toBe(2)
  expect(usualRate({ MaxBoundary: 100, AccountingSeconds: { train: 29 } })).toBeUndefined()
  expect(usualRate({ MaxBoundary: 9, AccountingSeconds: { train: 50 } })).toBeUndefined()
  expect(usualRate({})).toBeUndefined()
})
