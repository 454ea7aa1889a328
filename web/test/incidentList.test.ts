/** The list of incidents applies every filled filter, and shows the most urgent incidents first. */
import { expect, test } from 'vitest'

import type { Incident } from '../src/contract'
import { filtered, NO_OWNER, troubleFirst, valuesOf, type IncidentFilter } from '../src/model/incidentList'

const incident = (IncidentId: string, changes: Partial<Incident> = {}): Incident => ({
  IncidentId,
  Headline: 'GPU 5 of i-a failed',
  TrainingJobName: 'gpt',
  Project: 'default',
  RunId: 'run',
  Cause: 'hang',
  Phase: 'closed',
  Outcome: 'Recovered',
  Evidence: [],
  EvidenceFacts: [],
  Decision: '',
  Reason: '',
  GenerationBefore: 1,
  RankSources: [],
  InstanceIds: [],
  FaultedInstanceIds: [],
  ReplacementInstanceIds: [],
  FailedAt: 0,
  OpenedAt: 0,
  ClosedAt: 10,
  ...changes,
})
const NONE: IncidentFilter = { text: '', state: '', cause: '', owner: '', project: '' }
const all = [
  incident('closed old', { OpenedAt: 1, InstanceIds: ['i-lost'] }),
  incident('closed new', { OpenedAt: 5, Owner: 'ann', Cause: 'rank_exit' }),
  incident('open seen', { OpenedAt: 9, ClosedAt: undefined, AcknowledgementTime: 9, Project: 'speech' }),
  incident('open', { OpenedAt: 2, ClosedAt: undefined, FaultedInstanceIds: ['i-faulted'] }),
]
const names = (filter: Partial<IncidentFilter>) => filtered(all, { ...NONE, ...filter }).map((each) => each.IncidentId)

test('open incidents that nobody has acknowledged come first, then the newest', () => {
  expect(troubleFirst(all).map((each) => each.IncidentId)).toEqual(['open', 'open seen', 'closed new', 'closed old'])
})

test('each filter selects by its field', () => {
  expect(names({})).toHaveLength(4)
  expect(names({ state: 'open' })).toEqual(['open seen', 'open'])
  expect(names({ state: 'closed' })).toEqual(['closed old', 'closed new'])
  expect(names({ cause: 'rank_exit' })).toEqual(['closed new'])
  expect(names({ owner: 'ann' })).toEqual(['closed new'])
  expect(names({ owner: NO_OWNER })).toEqual(['closed old', 'open seen', 'open'])
  expect(names({ project: 'speech' })).toEqual(['open seen'])
  expect(names({ state: 'closed', owner: NO_OWNER })).toEqual(['closed old'])
})

test('the text finds nodes, owners and causes in words', () => {
  expect(names({ text: 'I-LOST' })).toEqual(['closed old'])
  expect(names({ text: 'i-faulted' })).toEqual(['open'])
  expect(names({ text: ' ann ' })).toEqual(['closed new'])
  expect(names({ text: 'GPU 5 of i-a' })).toHaveLength(4)
  expect(names({ text: 'training process' })).toEqual(['closed new'])
})

test('the values of a filter are each listed once', () => {
  expect(valuesOf(all, 'Owner')).toEqual(['ann'])
  expect(valuesOf(all, 'Cause')).toEqual(['hang', 'rank_exit'])
  expect(valuesOf(all, 'Project')).toEqual(['default', 'speech'])
})
