// @vitest-environment jsdom
/** The search box: what it finds, the actions of each role, and what Enter does. */
import { cleanup, fireEvent, screen, waitFor } from '@testing-library/react'
import { useState } from 'react'
import { describe, expect, test, vi } from 'vitest'

import type { Fleet, Incident, Node, TrainingJobSummary } from '../src/contract'
import { entriesOf, matching } from '../src/model/palette'
import Palette from '../src/parts/Palette'
import { drawn, served } from './drawn'

const job = (TrainingJobName: string, changes: Partial<TrainingJobSummary> = {}) =>
  ({
    TrainingJobName,
    RunId: `run-${TrainingJobName}`,
    FleetName: 'main',
    TrainingJobStatus: 'InProgress',
    SecondaryStatus: 'Training',
    ...changes,
  }) as TrainingJobSummary
const lists = {
  jobs: [
    job('gpt'),
    job('bert', { SecondaryStatus: 'Paused' }),
    job('old', { TrainingJobStatus: 'Completed', SecondaryStatus: 'Completed' }),
  ],
  fleets: [{ FleetName: 'main' }] as Fleet[],
  incidents: [
    { IncidentId: 'inc-1', Cause: 'node_fault' },
    { IncidentId: 'inc-2', Cause: 'node_fault' },
  ] as Incident[],
  nodes: [
    { NodeId: 'i-a', FleetName: 'main', NodeStatus: 'assigned' },
    { NodeId: 'i-b', FleetName: 'main', NodeStatus: 'spare' },
  ] as Node[],
}
const ADMIN = { mayRun: true, isAdmin: true }
const found = (text: string, permissions = ADMIN) =>
  matching(entriesOf(lists, permissions), text, 12).map(({ label }) => label)

describe('the search', () => {
  test('finds pages first, then objects, then actions', () => {
    expect(found('').slice(0, 3)).toEqual(['Overview', 'Jobs', 'Queue'])
    expect(found('gpt')).toEqual(['gpt', 'Pause gpt', 'Stop gpt…'])
    expect(found('inc-')).toEqual(['inc-2', 'inc-1'])
  })
  test('finds an entry by all words of the text, in any order', () => {
    expect(found('GPT stop')).toEqual(['Stop gpt…'])
  })
  test('finds an action although the name of a job contains its verb', () => {
    const entries = entriesOf({ ...lists, jobs: [job('nonstop')] }, ADMIN)
    const labels = matching(entries, 'stop nonstop', 12).map(({ label }) => label)
    expect(labels).toEqual(['Stop nonstop…', 'nonstop', 'Pause nonstop'])
  })
  test('has actions that the state of a job permits', () => {
    expect(found('bert action')).toEqual(['Resume bert', 'Stop bert…'])
    expect(found('old action')).toEqual([])
  })
  test('drains only nodes that work for a job', () => expect(found('drain')).toEqual(['Drain i-a…']))
  test('has only the actions of the role', () => {
    expect(found('action i-a', { mayRun: true, isAdmin: false })).toEqual([])
    const viewer = { mayRun: false, isAdmin: false }
    expect(found('action gpt', viewer)).toEqual([])
    expect(found('submit', viewer)).toEqual([])
    expect(found('theme', viewer)).toHaveLength(3)
    expect(found('sign', viewer)).toEqual(['Sign out'])
  })
  test('has an own id for each entry', () => {
    const ids = entriesOf(lists, ADMIN).map(({ id }) => id)
    expect(new Set(ids).size).toBe(ids.length)
  })
})

describe('the search box', () => {
  const events = { onShowKeys: vi.fn(), onSignOut: vi.fn(), onClose: vi.fn() }
  function Box({ text: initial }: { text: string }) {
    const [search, set] = useState({ text: initial, isEntered: false })
    return (
      <Palette
        {...search}
        {...events}
        onType={(text) => set({ text, isEntered: false })}
        onEnter={() => set({ ...search, isEntered: true })}
      />
    )
  }
  const open = (text: string) => {
    for (const each of Object.values(events)) each.mockClear()
    drawn(<Box text={text} />, {
      answers: {
        '["jobs"]': lists.jobs,
        '["fleets"]': lists.fleets,
        '["incidents",""]': lists.incidents,
        '["nodes","",false]': lists.nodes,
      },
    })
    fireEvent.keyDown(screen.getByRole('combobox'), { key: 'Enter' })
  }
  test('pauses a job and closes', async () => {
    const asked = served({ '/v1/training-jobs/run-gpt/pause': { body: {} } })
    open('pause gpt')
    await waitFor(() => expect(events.onClose).toHaveBeenCalled())
    const changes = asked.filter(({ method }) => method === 'POST').map(({ path }) => path)
    expect(changes).toEqual(['/v1/training-jobs/run-gpt/pause'])
  })
  test('stays open when the server refuses an action', async () => {
    const body = { Code: 'ConflictException', Message: 'it stops' }
    served({ '/v1/training-jobs/run-gpt/pause': { status: 409, body } })
    open('pause gpt')
    expect((await screen.findByRole('alert')).textContent).toMatch(/The action failed.*it stops/)
    expect(events.onClose).not.toHaveBeenCalled()
  })
  test('asks for the name before it stops a job', async () => {
    const asked = served({ '/v1/training-jobs/run-gpt/stop': { body: {} } })
    open('stop gpt')
    fireEvent.change(screen.getByLabelText('Type gpt to confirm'), { target: { value: 'gpt' } })
    expect(asked).toEqual([])
    fireEvent.click(screen.getByRole('button', { name: 'Stop' }))
    await waitFor(() => expect(asked.filter(({ method }) => method === 'POST')).toHaveLength(1))
  })
  test('drains a node with the dialog of the node', () => {
    open('drain i-a')
    expect(screen.getByLabelText<HTMLInputElement>(/^Drain/).checked).toBe(true)
  })
  test('signs out, and shows the keys', () => {
    open('sign out')
    expect(events.onSignOut).toHaveBeenCalledOnce()
    cleanup()
    open('keyboard shortcuts')
    expect(events.onShowKeys).toHaveBeenCalledOnce()
  })
})
