/** Answers of the API for which a page once contradicted itself or another page: the figures now agree. */
import { describe, expect, test } from 'vitest'

import type {
  DescribeProtectionResponse,
  Fleet,
  Incident,
  Node,
  TrainingJob,
  TrainingJobSummary,
} from '../src/contract'
import {
  dutyHook,
  fleetFigures,
  formatted,
  holdsNodes,
  hook,
  incidentFigures,
  jobFigures,
  nodeFigures,
  shown,
} from '../src/model/figures'
import { timeline } from '../src/model/timeline'
import { verdict } from '../src/model/verdict'

const NOW = 1_800_000_000
const job = (changes: Partial<TrainingJob> = {}) =>
  ({
    TrainingJobName: 'gpt',
    Duty: { Kind: 'Nothing', Urgency: 'None', Sentence: 'Nothing to do.', Actions: [] },
    RunId: 'run',
    FleetName: 'main',
    TrainingJobStatus: 'InProgress',
    SecondaryStatus: 'Training',
    Generation: 2,
    NodeCount: 3,
    GenerationNodeCount: 3,
    AssignedNodeCount: 3,
    HealthyNodeCount: 3,
    Boundary: 909,
    MaxBoundary: 909,
    BaseStep: 900,
    CommittedStep: 908,
    CreationTime: NOW - 900,
    TrainingStartTime: NOW - 800,
    ...changes,
  }) as TrainingJob
const protection = (changes: Partial<DescribeProtectionResponse> = {}) =>
  ({
    Generation: 2,
    CommittedStep: 908,
    Copies: 2,
    ProtectionState: 'Protected',
    Reason: '',
    Shards: [],
    RecoveryOdds: [{ LostNodes: 1, Probability: 1 }],
    ...changes,
  }) as DescribeProtectionResponse
const incident = (changes: Partial<Incident> = {}) =>
  ({
    IncidentId: 'inc',
    Headline: 'An instance was terminated',
    TrainingJobName: 'gpt',
    RunId: 'run',
    Cause: 'instance_terminated',
    Phase: 'replace',
    Outcome: 'Open',
    GenerationBefore: 1,
    InstanceIds: ['i-b'],
    FaultedInstanceIds: ['i-b'],
    ReplacementInstanceIds: [],
    RankSources: [],
    Evidence: [],
    EvidenceFacts: [],
    Decision: '',
    Reason: '',
    FailedAt: NOW - 60,
    OpenedAt: NOW - 58,
    DetectSeconds: 2,
    ...changes,
  }) as Incident

describe('memory', () => {
  test('that is released keeps no step', () => {
    const over = { TrainingJobStatus: 'Completed', SecondaryStatus: 'Completed', TrainingEndTime: NOW } as const
    const paused = { SecondaryStatus: 'Paused', HealthyNodeCount: 0, AssignedNodeCount: 0 } as const
    for (const changes of [over, paused]) {
      const figures = jobFigures(job(changes), { protection: protection({ ProtectionState: 'Unprotected' }) })
      expect(figures).toMatchObject({ committedStep: undefined, healthyNodes: undefined, protection: 'Released' })
      expect(figures.protectionTone).toBe('idle')
    }
    expect(holdsNodes(job({ Generation: 0 }))).toBe(false)
  })
  test('of a paused job that a user stops is released on its page and in a list', () => {
    const stopping = { SecondaryStatus: 'Stopping', TrainingStartTime: NOW - 90 } as const
    const waits = [{ State: 'queued', Status: 'Paused', StartTime: NOW, StatusMessage: '' }] as const
    const onPage = job({ ...stopping, SecondaryStatusTransitions: [...waits] })
    const unprotected = protection({ ProtectionState: 'Unprotected' })
    expect(jobFigures(onPage, { protection: unprotected }).protection).toBe('Released')
    const listed = { ...job(stopping), SecondaryStatusTransitions: undefined, IncidentCount: 0 }
    expect(jobFigures({ ...listed, ProtectionState: undefined }).protection).toBe('Released')
    expect(jobFigures({ ...listed, ProtectionState: 'Degraded' }).protection).toBe('Degraded')
  })
  test('has one committed step, though two answers are of different moments', () => {
    const older = protection({ CommittedStep: 905 })
    const newer = protection({ CommittedStep: 911 })
    expect(jobFigures(job(), { protection: older }).committedStep).toBe(908)
    expect(jobFigures(job(), { protection: newer }).committedStep).toBe(911)
    const beforeTheLaunch = protection({ Generation: 1, CommittedStep: 990 })
    const figures = jobFigures(job(), { protection: beforeTheLaunch })
    expect(figures).toMatchObject({ committedStep: 908, protection: 'Unknown' })
    const afterThePoll = protection({ Generation: 3, CommittedStep: 880 })
    expect(jobFigures(job(), { protection: afterThePoll }).committedStep).toBe(880)
  })
  test('that has a committed step is not said to have none', () => {
    const said = verdict({ job: job(), protection: protection({ CommittedStep: -1 }), now: NOW }).protection
    expect(said.text).toBe('Any one node can fail without the loss of a step.')
  })
})

describe('protection is not claimed', () => {
  test.each([0, 2])('while %i of 3 nodes are healthy', (HealthyNodeCount) => {
    const figures = jobFigures(job({ HealthyNodeCount }), { protection: protection() })
    expect(figures).toMatchObject({ protection: 'Unconfirmed', protectionTone: 'warn', healthyNodesTone: 'warn' })
    const said = verdict({ job: job({ HealthyNodeCount }), protection: protection(), now: NOW }).protection
    expect(said.text).not.toMatch(/survived/)
  })
  test('on the list while it is not on the page: one copy of each shard', () => {
    const listed = job() as unknown as TrainingJobSummary
    const entry = { ...listed, ProtectionState: 'Protected', SurvivesNodeLoss: false } as const
    const odds = protection({ Copies: 1, RecoveryOdds: [{ LostNodes: 1, Probability: 0 }] })
    expect(jobFigures(entry).protectionTone).toBe('warn')
    expect(jobFigures(job(), { protection: odds }).protectionTone).toBe('warn')
    expect(jobFigures({ ...entry, SurvivesNodeLoss: true }).protectionTone).toBe('good')
  })
  test('before the first commit, and is bad only later', () => {
    const none = protection({ CommittedStep: -1, ProtectionState: 'Unprotected', RecoveryOdds: [] })
    const at = (step: number) =>
      jobFigures(job({ CommittedStep: -1, Boundary: step, MaxBoundary: step }), { protection: none })
    expect(at(1)).toMatchObject({ protection: 'Not yet protected', protectionTone: 'idle' })
    expect(at(400)).toMatchObject({ protection: 'Unprotected', protectionTone: 'bad' })
  })
})

test('no more nodes are healthy than the job has', () => {
  const growing = job({ NodeCount: 3, GenerationNodeCount: 3, AssignedNodeCount: 5, HealthyNodeCount: 5 })
  expect(jobFigures(growing)).toMatchObject({ healthyNodes: 5, wantedNodes: 5 })
  const larger = job({ NodeCount: 3, GenerationNodeCount: 6, AssignedNodeCount: 5, HealthyNodeCount: 5 })
  expect(jobFigures(larger)).toMatchObject({ healthyNodes: 5, wantedNodes: 6, healthyNodesTone: 'warn' })
})

describe('an incident', () => {
  test('that ended its job tells apart the steps that training repeated and those that no checkpoint keeps', () => {
    const failed = job({
      TrainingJobStatus: 'Failed',
      SecondaryStatus: 'Failed',
      TrainingEndTime: NOW,
      MaxBoundary: 78,
      Boundary: 78,
    })
    const last = incident({ Phase: 'closed', Outcome: 'JobFailed', ClosedAt: NOW, LostSteps: 0 })
    const nothing = protection({ LastCheckpoint: undefined })
    expect(incidentFigures(last, NOW, failed, { protection: nothing })).toMatchObject({
      recomputedSteps: 0,
      unsavedSteps: 78,
    })
    const continued = { ...failed, InitialCheckpoint: { RunId: 'other', Step: 70 } }
    expect(incidentFigures(last, NOW, continued, { protection: nothing })).toMatchObject({
      unsavedSteps: 8,
      keptStep: 70,
    })
    expect(incidentFigures(last, NOW)).toMatchObject({ recomputedSteps: 0, unsavedSteps: undefined })
  })
  test.each([0, 0.4, 59, 4000])('has phases that add up to its total, %d s later', (later) => {
    const { phases, totalSeconds } = incidentFigures(incident(), NOW + later)
    expect(phases.reduce((sum, each) => sum + each.seconds, 0)).toBeCloseTo(totalSeconds)
    expect(totalSeconds).toBeCloseTo(60 + later)
  })
})

test('a lost node works until its failure, also while it still counts to the job', () => {
  const nodes = ['i-a', 'i-b'].map((NodeId) => ({ NodeId, StartTime: NOW - 800 }))
  const { lanes } = timeline(job(), [incident()], [], nodes, NOW)
  expect(lanes.find((each) => each.id === 'i-b')!.spans.map((each) => each.to)).toEqual([NOW - 60])
  expect(lanes.find((each) => each.id === 'i-a')!.spans.map((each) => each.to)).toEqual([NOW])
})

test('a fleet that waits for instances, and a node that is silent, are not green', () => {
  const fleet = {
    FleetName: 'main',
    FleetStatus: 'active',
    DesiredNodeCount: 4,
    ConnectedNodeCount: 3,
    NodeCount: 3,
  } as Fleet
  expect(fleetFigures(fleet)).toMatchObject({ status: 'waits for 1 instance', statusTone: 'busy', missingNodes: 1 })
  const node = { NodeId: 'i-a', NodeStatus: 'assigned', Connected: false } as Node
  expect(nodeFigures(node)).toMatchObject({ statusTone: 'warn', agent: 'not connected', agentTone: 'warn' })
})

test('nothing on a stale page is green', () => {
  const isStale = true
  const told = verdict({ job: job(), protection: protection(), isStale, now: NOW })
  expect([told.state, told.protection, told.line].map((each) => each.tone)).not.toContain('good')
  expect(dutyHook(told.figures, told.duty)).toMatchObject({ 'data-tone': 'idle' })
  const figures = jobFigures(job(), { protection: protection(), isStale })
  expect([figures.statusTone, figures.protectionTone, figures.healthyNodesTone]).toEqual(['idle', 'idle', 'idle'])
  expect(jobFigures(job(), { protection: protection() }).protectionTone).toBe('good')
})

test('a hook names the field, the object, the value and the tone', () => {
  const figures = jobFigures(job({ CostUsd: 1204.5 }), { protection: protection() })
  expect(hook(figures, 'committedStep')).toEqual({
    'data-figure': 'committed-step',
    'data-of': 'job/run',
    'data-value': '908',
  })
  expect(hook(figures, 'protection')).toMatchObject({ 'data-value': 'Protected', 'data-tone': 'good' })
  expect([shown(figures, 'costUsd'), shown(figures, 'ettrRatio'), formatted('replace-seconds', 61)]).toEqual([
    '$1,204.50',
    '–',
    '1 min 01 s',
  ])
})
